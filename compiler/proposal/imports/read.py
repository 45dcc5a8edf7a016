"""Finds the system of a file by its ending, or by its keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.document import parse_document, read_text
from partc.compiler.proposal.imports import megatron, mindspore
from partc.compiler.proposal.imports.imported import Imported
from partc.compiler.proposal.imports.torch_plan import of_styles, read_torch_plan

_KINDS = (
    "a .py with a parallelize_plan of torch, a tp_plan of transformers (its config.json, or patterns with words), arguments of "
    "Megatron-LM (a script, YAML), or strategy files of MindSpore (.json, one for each stage)"
)


def read_imported(files: Sequence[Path]) -> Imported:
    """What the files say, all of one system; several are MindSpore's. CompileError where they are of no known one."""
    first, source = files[0], ", ".join(file.name for file in files)
    if len(files) == 1 and first.suffix == ".py":
        return read_torch_plan(first)
    contents = []
    for file in files:
        text = read_text(file)
        options = (f"--{name.replace('_', '-')}" for name in (megatron.TP, megatron.STAGES))
        if len(files) == 1 and any(option in text for option in options):
            return megatron.read_megatron(megatron.arguments(text, str(file)), source, str(file))
        data = parse_document(text, str(file)).data
        if not isinstance(data, dict):
            raise _unknown(file, "the file has no keys")
        contents.append((str(file), data))
    data = contents[0][1]
    if any(mindspore.STRATEGIES in data or mindspore.LAYOUTS in data for _, data in contents):
        return mindspore.read_mindspore(contents, source)
    if len(files) > 1:
        raise _unknown(files[1], "several files are given, and they are not MindSpore's")
    named: dict[str, object] = {key.replace("-", "_"): value for key, value in data.items()}
    if megatron.TP in named or megatron.STAGES in named:
        return megatron.read_megatron(named, source, str(first))
    plan = next((data[key] for key in ("base_model_tp_plan", "tp_plan") if key in data), data)
    if isinstance(plan, dict) and plan and all(isinstance(style, str) for style in plan.values()):
        return of_styles(plan, source)
    raise _unknown(first, f"its keys are {', '.join(list(data)[:4])}")


def _unknown(file: Path, fact: str) -> CompileError:
    return CompileError(Problem(str(file), f"not a plan that partc can import: {fact}", help=f"pass {_KINDS}"))
