"""Records the calls of a `model.py` while it is loaded.

A `Recorder` is open during a load, and every call of `place` (`place_calls.py`) and of `shard` (`shard_calls.py`) is recorded with its
line. The paths of modules are looked up afterwards, because a module has its path only when the whole model stands. Outside of a load
these calls do nothing, so that the same file still serves other programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from partc.compiler.directives.calls import PlaceCall, ShardCall, TracedCall

_COMPILER = Path(__file__).parents[1]


@dataclass
class TorchCall:
    """A call, by a torch model that is exported, of a function that `calls` speak of; of its tensors in and out the shapes."""

    calls: tuple[TracedCall, ...]
    name: str
    arguments: list[tuple[object, ...]] = field(default_factory=list)
    results: list[tuple[object, ...]] = field(default_factory=list)


@dataclass
class Recorder:
    """The `place` and `shard` calls of one load, and the folder whose files are the model's own."""

    folder: Path
    calls: list[PlaceCall] = field(default_factory=list)
    shards: list[ShardCall] = field(default_factory=list)
    torch_calls: list[TorchCall] = field(default_factory=list)
    under_way: list[TorchCall] = field(default_factory=list)
    """The calls in a torch model that have not returned, the outermost first."""
    moved: dict[str, str] = field(default_factory=dict)
    """Maps the path of each module that such a call calls to its path below the function."""

    def line(self, file: str, number: int) -> str:
        """`model.py:12`: the file's path within the model's folder, or its bare name where it lies elsewhere."""
        path = Path(file)
        inside = path.is_relative_to(self.folder)
        return f"{path.relative_to(self.folder).as_posix() if inside else path.name}:{number}"

    def owns(self, file: str) -> bool:
        """Whether `file` belongs to the model: it is in the model's folder and is not a library's or the compiler's."""
        path = Path(file)
        if not path.is_relative_to(self.folder) or path.is_relative_to(_COMPILER):
            return False
        return "site-packages" not in path.relative_to(self.folder).parts


_open: ContextVar[Recorder | None] = ContextVar("partc_recorder", default=None)


@contextmanager
def recording(folder: Path) -> Iterator[Recorder]:
    """Records the `place` and `shard` calls made within."""
    recorder = Recorder(folder)
    token = _open.set(recorder)
    try:
        yield recorder
    finally:
        _open.reset(token)


def recorder() -> Recorder | None:
    """The recorder of the load that is under way; None outside of one."""
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
