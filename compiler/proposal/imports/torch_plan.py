"""A `parallelize_plan` of torch.distributed.tensor.parallel, as `parallelize_module` takes it, in a file of Python.

    parallelize_plan = {
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }

Keys are patterns of modules in torch as here. What a style says of a module's inputs and outputs is derived here, so only what shards
weights is taken. Styles are known by the names of their classes: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from partc.compiler.directives.recorder import recording
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.user_code import UserFile, errors_by_line, importable
from partc.compiler.ir.declared import TpPlanEntry
from partc.compiler.plan.styles import MEANINGS
from partc.compiler.proposal.imports.imported import Imported
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
