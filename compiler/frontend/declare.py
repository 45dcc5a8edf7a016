"""What a `model.py` says of its own distribution: `Input`, and the record of all that for the compiler.

While a model.py is loaded, a `Collector` is open and every call of `place` (`partc.compiler.frontend.place_calls`) and of `shard`
(`partc.compiler.frontend.shard_calls`) is recorded with its line; the paths of modules are looked up afterwards, because a module
learns its path only when the whole model stands. Outside of a load they do nothing, so that the same file still serves other
programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from partc.compiler.dims.symbol import Symbol

if TYPE_CHECKING:
    from partc.compiler.annotations.read import Annotations
    from partc.compiler.frontend.place_calls import PlaceCall
    from partc.compiler.frontend.shard_calls import ShardCall
    from partc.compiler.plan.rules import Dataset, ShardingRule

On: TypeAlias = int | tuple[int, ...] | Mapping[str, int]
"""Where a model places: a rank, a group, or coordinates along axes of the plan's mesh."""
_COMPILER = Path(__file__).parent


@dataclass(frozen=True)
class Input:
    """A model's input: each dim an int, a name or a Symbol; the dtype as numpy and ml_dtypes write it, or "string"."""

    shape: Sequence[int | str | Symbol]
    dtype: str = "float32"


@dataclass(frozen=True)
class Placement:
    """What matches `pattern` runs on this rank or group; `where` is the line that says so, such as `model.py:12`."""

    pattern: str
    on: On
    where: str


@dataclass(frozen=True)
class Declared:
    """All that a model declares: placements and cuts in the order of the calls, the constraints of its dims by name, the
    standard's annotations that it carries, and how its inputs arrive.
    """

    placements: tuple[Placement, ...] = ()
    symbols: Mapping[str, Symbol] = field(default_factory=dict)
    sharding: tuple[ShardingRule, ...] = ()
    annotations: Annotations | None = None
    dataset: Dataset | None = None


@dataclass
class Collector:
    """The `place` and `shard` calls of one load, and the folder whose files are the model's own."""

    folder: Path
    calls: list[PlaceCall] = field(default_factory=list)
    shards: list[ShardCall] = field(default_factory=list)

    def line(self, file: str, number: int) -> str:
        """`model.py:12`: the file's path within the model's folder, or its bare name where it lies elsewhere."""
        path = Path(file)
        inside = path.is_relative_to(self.folder)
        return f"{path.relative_to(self.folder).as_posix() if inside else path.name}:{number}"

    def owns(self, file: str) -> bool:
        """Whether `file` is a source of the model: it lies in the model's folder and is no library's, nor the compiler's."""
        path = Path(file)
        if not path.is_relative_to(self.folder) or path.is_relative_to(_COMPILER):
            return False
        return "site-packages" not in path.relative_to(self.folder).parts


_open: ContextVar[Collector | None] = ContextVar("partc_collector", default=None)


@contextmanager
def collecting(folder: Path) -> Iterator[Collector]:
    """Records the `place` and `shard` calls made within."""
    collector = Collector(folder)
    token = _open.set(collector)
    try:
        yield collector
    finally:
        _open.reset(token)


def collector() -> Collector | None:
    """The collector of the load that is going on."""
    return _open.get()


def calling_line(frame: FrameType) -> str:
    """The innermost line of the model's own files; the direct caller's where none is on the stack."""
    record, at = _open.get(), frame
    while record and not record.owns(at.f_code.co_filename) and at.f_back:
        at = at.f_back
    if record is None or not record.owns(at.f_code.co_filename):
        at = frame
        while Path(at.f_code.co_filename).is_relative_to(_COMPILER) and at.f_back:
            at = at.f_back
    file, line = at.f_code.co_filename, at.f_lineno
    return record.line(file, line) if record else f"{Path(file).name}:{line}"
