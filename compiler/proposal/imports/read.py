"""Identifies the system that wrote a file by the file's suffix or its keys.

MindSpore's strategy files, as `strategy_ckpt_config={"save_file": "strategy.json"}` writes them, one for each pipeline stage.

    {"current_stage": 0,
     "parallel_strategy_item": {"MatMul_layers.0.dense.weight": {"stage": 0, "parallel_strategy": [[2, 4], [4, 1]]}},
     "parallel_layout_item": {"layers.0.dense.weight": {"dev_matrix": [2, 4], "tensor_map": [0, -1], "tensor_shape": [64, 32], ...}}}

An operator's name is its kind and the parameter that it reads; its strategy has the number of shards of each dim of each input, as `in` of
a rule of `sharding` has. Layouts follow from strategies: of them the shapes are read, and the sharding of an optimizer.

A `parallelize_plan` of torch.distributed.tensor.parallel, as `parallelize_module` takes it, in a file of Python.

    parallelize_plan = {
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }

Keys are patterns of modules in torch as here. What a style says of a module's inputs and outputs is derived here, so only what shards
weights is taken. Styles are known by the names of their classes: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from partc.compiler.directives.recorder import recording
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.user_code import UserFile, errors_by_line, importable
from partc.compiler.ir.declared import TpPlanEntry
from partc.compiler.plan.document import parse_document, read_text
from partc.compiler.plan.styles import MEANINGS
from partc.compiler.proposal.imports import megatron
from partc.compiler.proposal.imports.imported import Imported, Strategy
from partc.runtime.files.regular import fault

NAMES = ("parallelize_plan", "tp_plan")
_LAYOUTS_ALONE = ("PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "NoParallel")


def read_torch_plan(file: Path) -> Imported:
    """The entries of the plan of this name that the file defines; words such as "colwise" stand for styles.

    CompileError where the file defines none, or one that does not map patterns to styles.
    """
    if why := fault(file):
        raise CompileError(
            Problem(str(file), "no such file" if not file.exists() else why, help="pass a file of Python")
        )
    file = file.resolve()
    with recording(file.parent) as recorder, importable(file.parent), errors_by_line(file, recorder):
        variables = UserFile.run(file).globals
    name = next((one for one in NAMES if one in variables), None)
    if name is None:
        fact = f"the file defines neither {' nor '.join(NAMES)}"
        raise CompileError(Problem(str(file), fact, help='write parallelize_plan = {"layers.*.up": ColwiseParallel()}'))
    plan = variables[name]
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        fact = f"{name} is {type(plan).__name__}, not a dict of modules' names and styles"
        raise CompileError(Problem(str(file), fact, help="give the dict that parallelize_module takes"))
    return of_styles(plan, file.name)


def of_styles(plan: Mapping[str, object], source: str) -> Imported:
    """The import of patterns with styles: torch's objects, or words of Hugging Face."""
    styles: list[TpPlanEntry] = []
    left: list[str] = []
    for pattern, style in plan.items():
        word = _word(style)
        if word:
            styles.append(TpPlanEntry(pattern, word, source))
        left += (f"{pattern}: {type(style).__name__}{text}" for text in _left(style))
    return Imported(source, styles=tuple(styles), ignored=tuple(left))


def _word(style: object) -> str:
    """The word of a style that shards weights; "" of one that speaks of values alone, or is not known."""
    if isinstance(style, str):
        return style
    match type(style).__name__:
        case "ColwiseParallel":
            outputs = getattr(style, "output_layouts", ()) or ()
            return "colwise_gather_output" if any(type(one).__name__ == "Replicate" for one in outputs) else "colwise"
        case "RowwiseParallel":
            return "rowwise"
    return ""


def _left(style: object) -> Iterator[str]:
    kind = type(style).__name__
    outputs = getattr(style, "output_layouts", ())
    scattered = [one.dim for one in outputs or () if type(one).__name__ == "Shard"] if kind == "RowwiseParallel" else []
    if scattered:
        yield (
            f", output sharded along dim {scattered[0]}: partc derives what leaves a module; "
            "`{style: rowwise, level: 1}` keeps it sharded for less memory"
        )
    elif kind == "SequenceParallel":
        yield ": a norm follows the layout of what it reads; `level: 1` of a rowwise rule before it shards it"
    elif not (isinstance(style, str) or kind in ("ColwiseParallel", "RowwiseParallel", *_LAYOUTS_ALONE)):
        yield f": partc has no such style; it has {', '.join(sorted(MEANINGS)[:4])} and others"


STRATEGIES, LAYOUTS = "parallel_strategy_item", "parallel_layout_item"


def read_mindspore(files: Sequence[tuple[str, Mapping[str, object]]], source: str) -> Imported:
    """The strategies of all files, by name and content. CompileError where an item is not as MindSpore writes it."""
    problems: list[Problem] = []
    strategies: dict[str, Strategy] = {}
    left: list[str] = []
    ranks = 0
    for file, content in files:
        layouts = _layouts(content, file, problems)
        shapes = {name: tuple(layout.get("tensor_shape") or ()) for name, layout in layouts.items()}
        ranks = max([ranks, *(math.prod(layout.get("dev_matrix") or ()) for layout in layouts.values())])
        if any((layout.get("opt_weight_shard_size") or 0) > 1 for layout in layouts.values()):
            left.append(
                "optimizer state in shards (opt_weight_shard_size): write `optimizer: {shard: true}` in `train:`"
            )
        items = content.get(STRATEGIES) or {}
        if not isinstance(items, dict):
            problems.append(Problem(file, f"{STRATEGIES} does not map operators to strategies", help=_LAW))
            continue
        for name, item in items.items():
            stage, inputs = _strategy(item)
            op, _, weight = name.partition("_")
            if inputs is None:
                problems.append(Problem(file, f"'{name}' has no stage and list of strategies", help=_LAW))
            else:
                strategies[name] = Strategy(op, weight, inputs, stage, shapes.get(weight, ()))
    if problems:
        raise CompileError(problems)
    degrees = {"ranks": ranks} if ranks > 1 else {}
    return Imported(source, degrees, strategies=tuple(strategies.values()), ignored=tuple(dict.fromkeys(left)))


_LAW = "pass the .json that `strategy_ckpt_config` has written"


def _strategy(item: object) -> tuple[int, tuple[tuple[int, ...], ...] | None]:
    """The stage of an item and its strategies; None for these where they are not lists of numbers of shards."""
    if not isinstance(item, dict) or not isinstance(stage := item.get("stage", 0), int) or stage < 0:
        return 0, None
    lists = item.get("parallel_strategy")
    if not isinstance(lists, list) or not all(map(_is_list_of_sizes, lists)):
        return 0, None
    return stage, tuple(map(tuple, cast("list[list[int]]", lists)))


def _is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and one > 0 for one in value)


def _layouts(content: Mapping[str, object], file: str, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """The layouts of a file by parameter, those that MindSpore could have written."""
    layouts = content.get(LAYOUTS) or {}
    if not isinstance(layouts, dict):
        problems.append(Problem(file, f"{LAYOUTS} does not map parameters to layouts", help=_LAW))
        return {}
    sizes = ("tensor_shape", "dev_matrix")
    sound = {}
    for name, layout in layouts.items():
        if isinstance(layout, dict) and all(_is_list_of_sizes(layout.get(key) or []) for key in sizes):
            sound[name] = layout
        else:
            problems.append(Problem(file, f"the layout of '{name}' has no lists of sizes", help=_LAW))
    return sound


_KINDS = (
    "a .py with a parallelize_plan of torch, a tp_plan of transformers (its config.json, or patterns with words), arguments of "
    "Megatron-LM (a script, YAML), or strategy files of MindSpore (.json, one for each stage)"
)


def read_imported(files: Sequence[Path]) -> Imported:
    """Reads files that are all of one system (only MindSpore has several). CompileError where the system is not known."""
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
    if any(STRATEGIES in data or LAYOUTS in data for _, data in contents):
        return read_mindspore(contents, source)
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
