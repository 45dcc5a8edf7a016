"""Whether a checkpoint fits a program: it has exactly the tensors that the program keeps, by name, shape and type.

To continue a run everything must fit: parameters, statistics, and the optimizer's tensors. To begin a new run from weights (`--init`) the
optimizer's tensors do not matter. All that does not fit is one error. The scale of a loss, and the rounding errors of messages, are
ignored: runs in float32 and float16, or on other ranks, continue from each other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from partc.runtime.artifact.format import StateRecord
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.errors import CheckpointError, UsageError
from partc.runtime.spellings import nearest

from .checkpoint import Checkpoint
from .index import Kind, TensorRecord

OPTIMIZER = "optimizer"
"""The key of `meta` under which a training run stores its optimizer's name."""
_SUGGESTED = 20
_WEIGHTS: tuple[Kind, ...] = ("parameter", "statistics")


def check_compatible(checkpoint: Checkpoint, records: Sequence[StateRecord], optimizer: str = "") -> None:
    """Checks that the checkpoint has exactly the tensors of the records, so that each can be loaded.

    `optimizer`: the name of the program's optimizer, for the message if the checkpoint's is another one. Raises CheckpointError with all
    that does not fit.
    """
    wanted = {record.tensor: record for record in records}
    held = checkpoint.index.tensors
    # what an optimizer keeps of each parameter: the names of its tensors without the parameter's
    ours = sorted({one.tensor.removeprefix(f"{one.parameter}.") for one in records if one.kind == "optimizer"})
    theirs = sorted({name.removeprefix(f"{one.parameter}.") for name, one in held.items() if one.kind == "optimizer"})
    problems = list(_weight_problems(checkpoint, wanted, strict=True))
    remedy = "give the checkpoint of a run of this model, or start from its weights alone with --init PATH"
    if ours != theirs:
        named = checkpoint.index.meta.get(OPTIMIZER)
        problems.append(
            f"{checkpoint.path}: was written with {_optimizer(str(named or ''), theirs)}; "
            f"the program has {_optimizer(optimizer, ours)}"
        )
        remedy = f"start from its weights alone with --init {checkpoint.path}, or compile with the same optimizer"
    else:
        problems += _slot_problems(checkpoint, wanted)
    if problems:
        raise CheckpointError("\n".join([*problems, f"  help: {remedy}"]))


def is_weights_file(path: Path) -> bool:
    """Whether initial weights come from a `.safetensors` file of any origin, and not from a checkpoint."""
    if path.suffix == ".safetensors" and not path.exists():
        raise UsageError(f"{path}: there is no such file\n  help: give a .safetensors file or a checkpoint's folder")
    return path.is_file()


def matching_weights(source: Checkpoint, records: Sequence[StateRecord], strict: bool = True) -> frozenset[str]:
    """Returns the tensors of the records to load from a source of initial weights: parameters and statistics of the same name.

    With `strict` the source must have all of the program's parameters, and no others; without, at least one. Shapes and types must be the
    same in any case. Raises CheckpointError with all that does not fit. A file may lack statistics: these then have their initial values.
    """
    wanted = {record.tensor: record for record in records if record.kind in _WEIGHTS}
    held = source.index.tensors
    problems = list(_weight_problems(source, wanted, strict, statistics=False))
    matching = frozenset(name for name in wanted if name in held and held[name].kind in _WEIGHTS)
    if not matching and not problems:
        like = nearest_text(next(iter(wanted), ""), held)
        problems.append(f"{source.path}: none of its {len(held)} tensors has the name of one of the program's{like}")
    if problems:
        help = "names, shapes and types must be the program's" if strict else "shapes and types must be the program's"
        some = ", and --only PATTERN takes some weights alone" if strict else ""
        raise CheckpointError(
            "\n".join([*problems, f"  help: {help}; `partc checkpoint export` writes such a file{some}"])
        )
    return matching


def _weight_problems(
    checkpoint: Checkpoint, wanted: Mapping[str, StateRecord], strict: bool, statistics: bool = True
) -> Iterator[str]:
    """Yields problems of parameters and statistics; without `statistics` the latter may be absent."""
    where = checkpoint.path
    ours = {name: record for name, record in wanted.items() if record.kind in _WEIGHTS}
    theirs = {name: held for name, held in checkpoint.index.tensors.items() if held.kind in _WEIGHTS}
    absent = [
        name for name, record in ours.items() if name not in theirs and (statistics or record.kind == "parameter")
    ]
    foreign_entries = [name for name in theirs if name not in ours]
    if strict:
        for at, name in enumerate(absent):
            like = nearest_text(name, foreign_entries) if at < _SUGGESTED else ""
            yield f"{where}: has no '{name}' {_text(ours[name])}{like}"
        for at, name in enumerate(foreign_entries):
            like = nearest_text(name, absent) if at < _SUGGESTED else ""
            yield f"{where}: has '{name}' {_saved_text(theirs[name])}, which the program lacks{like}"
    for name, record in ours.items():
        if name in theirs:
            yield from _difference(checkpoint, record, theirs[name])


def _slot_problems(checkpoint: Checkpoint, wanted: Mapping[str, StateRecord]) -> Iterator[str]:
    """Yields problems of an optimizer's tensors, for the parameters that both sides have; both sides have the same optimizer."""
    held = checkpoint.index.tensors
    for name, record in wanted.items():
        if record.kind != "optimizer":
            continue
        if name in held:
            yield from _difference(checkpoint, record, held[name])
        elif not record.parameter or record.parameter in held:
            yield f"{checkpoint.path}: has no '{name}' {_text(record)}"
    for name, found in held.items():
        if found.kind == "optimizer" and name not in wanted and (not found.parameter or found.parameter in wanted):
            yield f"{checkpoint.path}: has '{name}' {_saved_text(found)}, which the program lacks"


def fits(record: StateRecord, held: TensorRecord | None) -> bool:
    """Whether a checkpoint has a tensor of this shape and type."""
    return held is not None and _text(record) == _saved_text(held)


def _difference(checkpoint: Checkpoint, record: StateRecord, held: TensorRecord) -> Iterator[str]:
    if not fits(record, held):
        yield f"{checkpoint.path}: '{record.tensor}' is {_saved_text(held)}; the program's is {_text(record)}"


def _text(record: StateRecord) -> str:
    dtype = dense(record.type)
    return f"{dtype.shown if dtype else record.type} {record.shape}"


def _saved_text(held: TensorRecord) -> str:
    return f"{held.dtype} {list(held.shape)}"


def _optimizer(name: str, slots: Sequence[str]) -> str:
    """Returns a text of an optimizer's name and its tensors: `the optimizer 'adam', which keeps m, v`."""
    keeps = ", ".join(slots) or "nothing"
    if ", " in name:
        return f"the optimizers {name}, which keep {keeps}"
    return f"the optimizer '{name}', which keeps {keeps}" if name else f"an optimizer that keeps {keeps}"


def nearest_text(name: str, names: Iterable[str]) -> str:
    """Returns the names most similar to one, as the end of a message; same endings first, since prefixes differ most often."""
    last = name.rpartition(".")[2]
    some = list(names)
    ending = [other for other in some if other.endswith((f".{name}", f"_{name}")) or name.endswith(f".{other}")]
    alike = ending or nearest(name, [other for other in some if other.endswith(last)] or some)
    return f"; the nearest {'is' if len(alike[:3]) == 1 else 'are'} {', '.join(map(repr, alike[:3]))}" if alike else ""
