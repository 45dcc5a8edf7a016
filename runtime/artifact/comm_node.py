"""A collective node as data: what it says, and which shape it makes of which.

    call = read_call(node, "rank_0000.onnx")
    result_shape(call, (4, 6), 3)          # what one of 3 ranks gets where each gives (4, 6)

The law of sizes, for p ranks: what an op splits is divided by p, what it joins is multiplied by p (`collectives.py`); other dims stay.
Negative axes count from the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ArtifactError
from .collectives import COLLECTIVES, CollectiveOp, dynamic_ops
from .dtypes import Dtype, dense
from .format import (
    DOMAIN,
    GIVERS,
    GROUP,
    OWNERS,
    PULL,
    RANK,
    RECV_BOXES,
    RECV_PEERS,
    REDUCE,
    REDUCTIONS,
    ROOT,
    ROW,
    ROWS,
    SEND_BOXES,
    SEND_PEERS,
    SUM,
    TAG,
    Collective,
)
from .onnx_graph import path_of

if TYPE_CHECKING:
    from onnx import AttributeProto, NodeProto

Shape: TypeAlias = tuple[int, ...]
Span: TypeAlias = tuple[tuple[int, int, int], ...]
"""A box: per dim begin, end and denominator."""


@dataclass(frozen=True)
class Shard:
    """A box of a value that goes to `peer` or comes from it."""

    peer: int
    box: Span


@dataclass(frozen=True)
class Call:
    """A collective node; `source` is None where the rank gives nothing, `result` where it gets nothing.

    `axis` is the one axis that an op splits or joins, and of an op that does both (AllToAll) the one that it splits; `gives` and `takes`
    are Exchange's. One of several values has them as `parts`, what goes in and what comes out; `source` and `result` of an AllReduce
    then name the memory where all of them lie, and the others have none.

    Of a Pull `source` are the ids and `operand` is the table; of a Push, which has no `source`, `operand` are the rows that go, and
    `numbers` the ids that come beside the rows. `result` are rows. `asked`: what a Pull makes and a Push reads, the ids that an owner was
    asked, counts, and places. `owners` and `givers` are places in the list; `rows` and `row` say how large the table is.
    """

    op: str
    source: str | None
    result: str | None
    group: str
    tag: int
    path: str
    reduce: str = ""
    axis: int = 0
    concat_axis: int = 0
    root: int = 0
    gives: tuple[Shard, ...] = ()
    takes: tuple[Shard, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    operand: str | None = None
    numbers: str | None = None
    asked: tuple[str | None, ...] = ()
    owners: tuple[int, ...] = ()
    givers: tuple[int, ...] = ()
    rows: int = 0
    row: Shape = ()

    @property
    def kind(self) -> CollectiveOp:
        """The entry of its op."""
        return COLLECTIVES[self.op]

    @property
    def join_axis(self) -> int:
        """The axis along which the result is joined, of an op that joins."""
        return self.concat_axis if self.kind.splits else self.axis

    @property
    def value(self) -> str:
        """The value that reports name: what comes out, or what goes in where nothing does."""
        return self.parts[0][1] if self.parts else self.result or self.source or self.operand or ""

    @property
    def in_one_buffer(self) -> bool:
        """Whether its values lie side by side in memory, where it works in place: those of an AllReduce of several."""
        return bool(self.parts) and self.kind.keeps_size

    @property
    def given(self) -> tuple[str, ...]:
        """The values that the rank gives."""
        ends = (self.operand, self.source) if self.op == PULL else (*self.asked, self.source, self.operand)
        return tuple(source for source, _ in self.parts) or tuple(filter(None, ends))

    @property
    def made(self) -> tuple[str, ...]:
        """The values that the rank gets."""
        ends = (self.result, *self.asked) if self.op == PULL else (self.numbers, self.result)
        return tuple(result for _, result in self.parts) or tuple(filter(None, ends))

    @property
    def made_numbers(self) -> tuple[str, ...]:
        """Of what the rank gets in a lookup that which is no rows: ids, counts and places."""
        return tuple(name for name in self.made if name != self.result) if self.kind.looks_up else ()

    @property
    def typed(self) -> str | None:
        """The value that goes in whose type is that of what comes out."""
        return self.operand if self.kind.looks_up else self.source

    @property
    def leaves(self) -> bool:
        """Whether bytes may still leave when the rank goes on, as those of a Send do; a Pull or a Push is over by then."""
        return self.kind.boxes or (not self.made and not self.kind.looks_up)

    @property
    def rows_of_owner(self) -> int:
        """How many rows of the table each owner has."""
        return self.rows // len(self.owners)


def read_call(node: NodeProto, where: str) -> Call:
    """The call that a node states; ArtifactError, naming the file `where`, if it is no sound node of `COLLECTIVES`."""
    if node.op_type not in COLLECTIVES:
        raise ArtifactError(
            f"{where}: this partc does not know the op '{DOMAIN}.{node.op_type}'\n  help: install a newer partc"
        )
    found = {attribute.name: attribute for attribute in node.attribute}
    name = node.name or next(filter(None, (*node.output, *node.input)), "")
    problems = [*_problems(node, found)]
    if problems:
        lines = [f"{where}: {node.op_type} '{name}': {problem}" for problem in problems]
        raise ArtifactError("\n".join([*lines, "  help: compile again"]))

    def number(name: str) -> int:
        return found[name].i if name in found else 0

    kind = COLLECTIVES[node.op_type]
    if kind.looks_up:
        return _lookup(node, found)
    parts = tuple(zip(node.input, node.output, strict=True)) if len(node.input) > 1 else ()
    source, result = next(filter(None, node.input), None), next(filter(None, node.output), None)
    if parts:
        source = result = f"{node.output[0]} and {len(parts) - 1} more" if kind.keeps_size else None
    return Call(
        op=node.op_type,
        source=source,
        result=result,
        group=found[GROUP].s.decode(errors="replace"),
        tag=number(TAG),
        path=path_of(node),
        reduce=found[REDUCE].s.decode(errors="replace") if REDUCE in found else "",
        axis=number(kind.splits or kind.joins),
        concat_axis=number(kind.joins if kind.splits else ""),
        root=number(ROOT),
        gives=_shards(found, SEND_PEERS, SEND_BOXES),
        takes=_shards(found, RECV_PEERS, RECV_BOXES),
        parts=parts,
    )


def _lookup(node: NodeProto, found: Mapping[str, AttributeProto]) -> Call:
    """The call that a sound Pull or Push states."""
    given = [*(name or None for name in node.input), *[None] * 4]
    made = [*(name or None for name in node.output), *[None] * 4]
    pulls = node.op_type == PULL
    return Call(
        op=node.op_type,
        source=given[1] if pulls else None,
        result=made[0] if pulls else made[1],
        group=found[GROUP].s.decode(errors="replace"),
        tag=found[TAG].i,
        path=path_of(node),
        operand=given[0] if pulls else given[3],
        numbers=None if pulls else made[0],
        asked=tuple(made[1:4] if pulls else given[:3]),
        owners=tuple(found[OWNERS].ints),
        rows=found[ROWS].i,
        row=tuple(found[ROW].ints) if ROW in found else (),
        givers=tuple(found[GIVERS].ints) if GIVERS in found else (),
    )


def result_shape(call: Call, shape: Shape, ranks: int) -> Shape:
    """The shape of what a rank gets where each of so many gives `shape`; ValueError says why there is none.

    An Exchange's result has the shape that its rank file states, and how many rows a Push gives only a run tells.
    """
    kind = call.kind
    if kind.looks_up:
        return (*shape, *call.row)
    if kind.splits:
        shape = _scaled(shape, place_of(call.axis, shape), 1, ranks)
    if kind.joins:
        shape = _scaled(shape, place_of(call.join_axis, shape), ranks, 1)
    return shape


def wrong_end(call: Call, is_root: bool) -> str:
    """What is wrong with the ends of a call with a root, on the root or on another rank; empty where nothing is."""
    who, root = "its root" if is_root else "a rank that is not its root", call.kind.root
    if root == "takes" and bool(call.result) != is_root:
        return f"{who} {'gets nothing' if is_root else 'gets a result'}"
    if root == "gives" and is_root and not call.source:
        return f"{who} gives nothing"
    return f"{who} gets nothing" if root == "gives" and not is_root and not call.result else ""


_NO_PART = "a rank takes part that has neither rows nor ids"


def contradictions(call: Call, record: Collective, ranks: Sequence[int], rank: int) -> Iterator[str]:
    """Why a rank cannot run a call that the manifest lists as `record`, among the ranks of its list."""
    dtype = dense(record.type)
    if dtype is None:
        yield f"a {record.type} cannot take part in a collective"
    elif call.reduce and not reducible(dtype, call.reduce):
        yield f"a {record.type} has no {call.reduce}"
    if call.kind.looks_up:
        yield from _contradicts_owners(call, dtype, len(ranks), ranks.index(rank))
        return
    if record.shape is None and not call.kind.dynamic:
        yield f"the shape of its input is not known; only {dynamic_ops()} take such"
    if not 0 <= call.root < len(ranks):
        yield f"its root is {call.root}, and its list has {len(ranks)} ranks"
    elif wrong := wrong_end(call, ranks[call.root] == rank):
        yield wrong
    if outside := sorted({one.peer for one in (*call.gives, *call.takes)} - {*ranks}):
        yield f"its peer {outside[0]} is not in its list, ranks {', '.join(map(str, ranks))}"


def _contradicts_owners(call: Call, dtype: Dtype | None, ranks: int, place: int) -> Iterator[str]:
    """Why a rank of so many cannot run a Pull or a Push."""
    if dtype is not None and dtype.bits < 8:
        yield f"rows of a {dtype.name} cannot be looked up on other ranks"
    for word, places in (("owner", call.owners), ("giver", call.givers)):
        if wrong := [one for one in places if not 0 <= one < ranks]:
            yield f"its {word} {wrong[0]} is no place in a list of {ranks} ranks"
    owns, gives = place in call.owners, place in call.givers
    yield from _contradicts_pull(call, owns, gives) if call.op == PULL else _contradicts_push(call, owns, gives)
    yield from _contradicts_asked(call, owns, gives)


def _contradicts_pull(call: Call, owns: bool, gives: bool) -> Iterator[str]:
    """What a rank's Pull lacks, or has beyond its part; `gives`: its Push gives rows back."""
    if owns != bool(call.operand):
        yield "an owner gives no table" if owns else "a rank that is no owner gives a table"
    if not owns and not call.source:
        yield _NO_PART
    if bool(call.source) != bool(call.result):
        yield "a rank has ids and the rows that they name, or neither"
    if gives and not call.source:
        yield "a giver has no ids"


def _contradicts_push(call: Call, owns: bool, gives: bool) -> Iterator[str]:
    """What a rank's Push lacks, or has beyond its part."""
    if owns and not (call.numbers and call.result):
        yield "an owner gets no ids and rows"
    elif not owns and (call.numbers or call.result):
        yield "a rank that is no owner gets ids and rows"
    if not owns and not gives:
        yield _NO_PART
    if gives != bool(call.operand):
        yield "a giver has no rows to give" if gives else "a rank that is no giver gives rows"


def _contradicts_asked(call: Call, owns: bool, gives: bool) -> Iterator[str]:
    """Which values by which a Push knows its Pull a rank lacks, or has beyond its part."""
    words = [word for word, so in (("an owner", owns), ("a giver", gives)) if so]
    role, due = " and ".join(words) or "neither owner nor giver", (owns, owns or gives, gives)
    for word, name, wanted in zip(("the ids asked of it", "counts", "places"), call.asked, due, strict=True):
        if bool(name) != (wanted and bool(call.givers)):
            back = "" if call.givers else ", and no rank gives rows back"
            yield f"it {'has' if name else 'leaves out'} {word}, and is {role}{back}"


def place_of(axis: int, shape: Shape) -> int:
    """An axis counted from the front; ValueError where the shape has none such."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"there is no axis {axis} in a value of {len(shape)} dims")
    return axis % len(shape)


def reducible(dtype: Dtype, reduce: str) -> bool:
    """Whether values of a type can be reduced so: complex numbers have a sum and no order."""
    return reduce == SUM or not dtype.name.startswith("complex")


def _scaled(shape: Shape, axis: int, times: int, by: int) -> Shape:
    size = shape[axis] * times
    if size % by:
        raise ValueError(f"axis {axis} of {size} is not divisible by {by} ranks")
    return (*shape[:axis], size // by, *shape[axis + 1 :])


def _shards(found: Mapping[str, AttributeProto], peers: str, boxes: str) -> tuple[Shard, ...]:
    if peers not in found:
        return ()
    rank = found[RANK].i
    numbers = list(found[boxes].ints) if boxes in found else []
    dims = [(numbers[at], numbers[at + 1], numbers[at + 2]) for at in range(0, len(numbers), 3)]
    return tuple(
        Shard(peer, tuple(dims[index * rank : (index + 1) * rank])) for index, peer in enumerate(found[peers].ints)
    )


def _problems(node: NodeProto, found: Mapping[str, AttributeProto]) -> list[str]:
    """What keeps a node from being a call."""
    kind = COLLECTIVES[node.op_type]
    problems = [
        f"its attribute '{one.name}' is missing"
        for one in kind.every_attribute
        if one.required and one.name not in found
    ]
    if kind.looks_up:
        return problems or [*_lookup_problems(node, found)]
    sources, results = [*filter(None, node.input)], [*filter(None, node.output)]
    if kind.coalesces and len(sources) > 1:
        axis = kind.splits or kind.joins
        if axis in found and found[axis].i != 0:
            problems.append(f"its axis is {found[axis].i}, and several values are cut along axis 0")
        if len(sources) != len(results) or len(sources) != len(node.input):
            problems.append(f"it has {len(sources)} inputs and {len(results)} outputs, and makes one of each")
        sources, results = sources[:1], results[:1]
    if len(sources) > 1 or (not sources and not kind.boxes and kind.root != "gives"):
        problems.append(f"it has {len(sources)} inputs, and takes one")
    if len(results) > 1 or (not results and not kind.boxes and not kind.root):
        problems.append(f"it has {len(results)} outputs, and makes one")
    if REDUCE in found and (reduction := found[REDUCE].s.decode(errors="replace")) not in REDUCTIONS:
        problems.append(f"its reduction is '{reduction}'; it is one of {', '.join(REDUCTIONS)}")
    if kind.boxes and not problems:
        problems += _box_problems(found, bool(sources), SEND_PEERS, SEND_BOXES, "input")
        problems += _box_problems(found, bool(results), RECV_PEERS, RECV_BOXES, "output")
    return problems


def _lookup_problems(node: NodeProto, found: Mapping[str, AttributeProto]) -> Iterator[str]:
    most = (2, 4) if node.op_type == PULL else (4, 2)
    if len(node.input) > most[0] or len(node.output) > most[1]:
        yield f"it has {len(node.input)} inputs and {len(node.output)} outputs, and takes {most[0]} and makes {most[1]}"
    givers = list(found[GIVERS].ints) if GIVERS in found else []
    if len({*givers}) < len(givers) or (node.op_type != PULL and not givers):
        yield f"its givers are {givers}: different places are needed"
    owners, rows = found[OWNERS].ints, found[ROWS].i
    if not owners or len({*owners}) < len(owners):
        yield f"its owners are {list(owners)}: different places are needed"
    elif rows <= 0 or rows % len(owners):
        yield f"{rows} rows are no equal runs of {len(owners)} owners"
    if ROW in found and any(size < 0 for size in found[ROW].ints):
        yield f"its row has the shape {list(found[ROW].ints)}"


def _box_problems(found: Mapping[str, AttributeProto], there: bool, peers: str, boxes: str, kind: str) -> Sequence[str]:
    count = len(found[peers].ints) if peers in found else 0
    numbers = list(found[boxes].ints) if boxes in found else []
    rank = found[RANK].i
    if len(numbers) != 3 * rank * count:
        return [f"'{boxes}' has {len(numbers)} numbers, and {count} boxes of {rank} dims need {3 * rank * count}"]
    if bool(count) != there:
        return [f"it has {count} '{peers}' and {'an' if there else 'no'} {kind}"]
    cells = [tuple(numbers[at : at + 3]) for at in range(0, len(numbers), 3)]
    wrong = [cell for cell in cells if not 0 <= cell[0] <= cell[1] <= cell[2] or cell[2] == 0]
    return [f"'{boxes}' has {cell[0]}/{cell[2]} to {cell[1]}/{cell[2]}" for cell in wrong[:1]]
