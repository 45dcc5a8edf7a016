"""Lists of ranks, and the shards of ranks, in the manifest: short lists are written out, long ones as ranges and grids.

    ranks    [0, 2, 5]                 "0-4095"   "0-4088:8"  (from 0 in steps of 8)
    boxes    [[[0, 1, 2]], ...]        {"mesh": [512, 8], "cuts": [[1], []]}   the ranks are a grid, the first dim is cut along its axis 1
    groups   [[0, 1], [2, 3]]          ["0-7", "8-15", ...]
    programs ["a.onnx", "b.onnx"]      {"a.onnx": "0-4088:8", ...}

In memory, ranks are a list, and boxes are a sequence whose items are computed on access, so that a rank computes only its own.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, TypeAlias, overload

from pydantic import PlainSerializer, PlainValidator, ValidationInfo

from ..files.counted import Budget

Box: TypeAlias = list[list[int]]
"""A shard of a value: for each dim `[begin, end, denominator]`, fractions of the whole dim."""
_WRITTEN_OUT = 8
"""The longest list of ranks that is written out."""
_AXES = 64
"""The most axes of a grid."""
_ROW = 3
"""The fewest ranks with the same step above 1 that are written as a range."""
MOST_RANKS = 1 << 16
"""The most ranks of a job."""
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)


class SharedRanks(list[int]):
    """A list of ranks that many records share, known to hold whole numbers and never changed, so that its text is computed once."""

    @functools.cached_property
    def text(self) -> str:
        """The ranks as `order_text` writes them."""
        return order_text(self)


def lists_by_rank(groups: Mapping[str, Iterable[Sequence[int]]]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Maps each rank, and each group with a list that contains the rank, to that list."""
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, lists in groups.items():
        for ranks in map(tuple, lists):
            for rank in ranks:
                found.setdefault(rank, {})[name] = ranks
    return found


def ranks_text(ranks: Iterable[int]) -> str:
    """Writes ranks in rising order, as a rank file names them: `0-3,8`."""
    return order_text(sorted(ranks))


def order_text(ranks: Iterable[int]) -> str:
    """Writes ranks in their order: `3,0-2`; three or more with the same step above 1 as `0-24:8`."""
    return _order_text(tuple(ranks))


@functools.lru_cache(maxsize=4096)
def _order_text(ranks: tuple[int, ...]) -> str:
    texts: list[str] = []
    at = 0
    while at < len(ranks):
        end, step = at + 1, ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 0
        while end < len(ranks) and 0 < step == ranks[end] - ranks[end - 1]:
            end += 1
        if step != 1 and end - at < _ROW:
            end = at + 1
        first, last = ranks[at], ranks[end - 1]
        texts.append(str(first) if end == at + 1 else f"{first}-{last}" + (f":{step}" if step > 1 else ""))
        at = end
    return ",".join(texts)


def ranks_of(text: str, count: Callable[[int], None] = lambda number: None) -> list[int]:
    """Reads ranks that `order_text` wrote; ValueError for any other text. Calls `count` with each range's size before listing the range."""
    ranks: list[int] = []
    for span in filter(None, text.split(",")):
        if (match := _SPAN.fullmatch(span)) is None:
            raise ValueError(f"'{span}' is not a list of ranks; ranks are written as '3', '0-7' or '0-56:8'")
        first, last, step = match.groups()
        row = range(int(first), int(last or first) + 1, int(step or 1))
        if len(row) + len(ranks) > MOST_RANKS:
            raise ValueError(f"'{text}' are more than {MOST_RANKS} ranks")
        count(len(row))
        ranks += row
    return ranks


@dataclass(frozen=True, eq=False)
class Grid(Sequence[Box]):
    """The shards of ranks in a grid of the sizes `mesh`, row-major, the last axis fastest.

    `cuts`: for each dim the axes of the mesh that shard it, the major one first. `part`: for each dim begin, end and size, where the value
    is a part of a larger value, and the boxes are fractions of the larger one.
    """

    mesh: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    part: tuple[tuple[int, int, int], ...] = ()

    def __len__(self) -> int:
        return math.prod(self.mesh)

    @overload
    def __getitem__(self, at: int) -> Box: ...

    @overload
    def __getitem__(self, at: slice) -> list[Box]: ...

    def __getitem__(self, at: int | slice) -> Box | list[Box]:
        if isinstance(at, slice):
            return [self[k] for k in range(len(self))[at]]
        numbers, strides = self._numbers(range(len(self))[at]), self._counts
        spans = [[number, number + 1, count] for number, count in zip(numbers, strides, strict=True)]
        return [_within(*pair) for pair in zip(spans, self.part, strict=True)] if self.part else spans

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Grid) and (self.mesh, self.cuts, self.part) == (other.mesh, other.cuts, other.part):
            return True
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def distinct(self) -> Iterator[tuple[int, Box]]:
        """Yields every distinct shard once, with the first place that has it: places along axes that cut no dim have the same shard."""
        cutting = {axis for axes in self.cuts for axis in axes}
        strides = [math.prod(self.mesh[axis + 1 :]) for axis in range(len(self.mesh))]
        rows = [range(0, size * stride, stride) for size, stride in zip(self.mesh, strides, strict=True)]
        for places in itertools.product(*(row if axis in cutting else row[:1] for axis, row in enumerate(rows))):
            yield sum(places), self[sum(places)]

    def divisor(self, axis: int) -> int:
        """The number by which the size of an axis must be divisible for the edges of all shards to be integers."""
        count = self._counts[axis]
        if not self.part:
            return count
        spans = (_within((number, number + 1, count), self.part[axis]) for number in range(count))
        edges = {Fraction(edge, of) for begin, end, of in spans for edge in (begin, end)}
        return math.lcm(*(edge.denominator for edge in edges))

    @functools.cached_property
    def _counts(self) -> list[int]:
        return [math.prod(self.mesh[axis] for axis in axes) for axes in self.cuts]

    def _numbers(self, index: int) -> list[int]:
        """Returns the index of the shard along each dim, for a place in the grid."""
        at = []
        for size in reversed(self.mesh):
            index, coordinate = divmod(index, size)
            at.append(coordinate)
        at.reverse()
        indices = []
        for axes in self.cuts:
            number = 0
            for axis in axes:
                number = number * self.mesh[axis] + at[axis]
            indices.append(number)
        return indices


def _within(span: Sequence[int], part: Sequence[int]) -> list[int]:
    """Converts a span of a part (begin, end, denominator) to a span of the larger value, in which `part` is (begin, end, size)."""
    (begin, end, count), (start, stop, size) = span, part
    edges = [start * count + (stop - start) * edge for edge in (begin, end)]
    shared = math.gcd(*edges, size * count)
    return [*(edge // shared for edge in edges), size * count // shared]


def _is_row(value: object, length: int | None = None) -> bool:
    return isinstance(value, list | tuple) and (length is None or len(value) == length) and {*map(type, value)} <= {int}


def _read_ranks(value: Any, info: ValidationInfo) -> list[int]:
    if isinstance(value, str):
        return _listed(value, info.context)
    if isinstance(value, SharedRanks):
        return value
    if not _is_row(value):
        raise ValueError("it should be a list of ranks, or a text such as '0-3,8'")
    return value if isinstance(value, list) else list(value)


def _listed(text: str, budget: Budget | None) -> list[int]:
    """Reads the ranks of a text; all records of one manifest with the same text get the same list, which is never changed."""
    if budget is None:
        return ranks_of(text)
    if text not in budget.known:
        budget.known[text] = ranks_of(text, budget.take)
    return budget.known[text]


def _write_ranks(ranks: Sequence[int]) -> list[int] | str:
    if len(ranks) <= _WRITTEN_OUT:
        return list(ranks)
    return ranks.text if isinstance(ranks, SharedRanks) else order_text(ranks)


def _read_boxes(value: Any) -> Sequence[Box] | None:
    if value is None or isinstance(value, Grid):
        return value
    if isinstance(value, dict):
        return _read_grid(value)
    if isinstance(value, list) and all(isinstance(box, list) and all(_is_row(one) for one in box) for box in value):
        return value
    raise ValueError("it should be a list of boxes, or a grid with 'mesh' and 'cuts'")


def _read_grid(value: Mapping[str, Any]) -> Grid:
    mesh: Any = value.get("mesh")
    cuts: Any = value.get("cuts")
    part: Any = value.get("part", [])
    if unknown := sorted(value.keys() - {"mesh", "cuts", "part"}):
        raise ValueError(f"a grid has no '{unknown[0]}'")
    if not _is_row(mesh) or not isinstance(cuts, list) or not all(map(_is_row, cuts)) or not isinstance(part, list):
        raise ValueError("a grid has 'mesh', a list of sizes, and 'cuts', by dim a list of axes")
    used = [axis for axes in cuts for axis in axes]
    if len(mesh) > _AXES or min(mesh, default=1) < 1 or math.prod(mesh) > MOST_RANKS:
        raise ValueError(f"a grid of {str(mesh[:_AXES])[:80]} is not a grid of ranks")
    if len(used) != len({*used}) or not all(0 <= axis < len(mesh) for axis in used):
        raise ValueError(f"the axes {cuts} are not each once among those of {mesh}")
    if part and not (
        len(part) == len(cuts) and all(_is_row(one, 3) and 0 <= one[0] < one[1] <= one[2] for one in part)
    ):
        raise ValueError(f"its part {part} is not {len(cuts)} times begin, end and size")
    return Grid(tuple(mesh), tuple(map(tuple, cuts)), tuple(map(tuple, part)))


def _write_boxes(boxes: Sequence[Box] | None) -> Any:
    if not isinstance(boxes, Grid) or len(boxes) <= _WRITTEN_OUT:
        return None if boxes is None else [*boxes]
    part = {"part": [list(one) for one in boxes.part]} if boxes.part else {}
    return {"mesh": list(boxes.mesh), "cuts": [list(axes) for axes in boxes.cuts], **part}


def _read_programs(value: Any, info: ValidationInfo) -> list[str]:
    if isinstance(value, dict):
        lists = {name: _read_ranks(text, info) for name, text in value.items()}
        if sum(map(len, lists.values())) > MOST_RANKS:
            raise ValueError(f"it has more than {MOST_RANKS:,} ranks")
        by_rank = {rank: name for name, ranks in lists.items() for rank in ranks}
        if by_rank.keys() != {*range(len(by_rank))}:
            raise ValueError("its ranks are not those from 0 on")
        value = [by_rank[rank] for rank in range(len(by_rank))]
    if not isinstance(value, list) or not {*map(type, value)} <= {str}:
        raise ValueError("it should be a list of files, or by file its ranks")
    return value


def _write_programs(programs: Sequence[str]) -> list[str] | dict[str, str]:
    if len(programs) <= _WRITTEN_OUT:
        return list(programs)
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(programs):
        found.setdefault(name, []).append(rank)
    return {name: order_text(ranks) for name, ranks in found.items()}


Ranks: TypeAlias = Annotated[list[int], PlainValidator(_read_ranks), PlainSerializer(_write_ranks)]
Boxes: TypeAlias = Annotated[Sequence[Box] | None, PlainValidator(_read_boxes), PlainSerializer(_write_boxes)]
Programs: TypeAlias = Annotated[list[str], PlainValidator(_read_programs), PlainSerializer(_write_programs)]
