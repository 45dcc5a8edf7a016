"""Ring attention: each rank keeps its queries, and blocks of keys and values pass from rank to rank, one hop at a time.

    forward    hop 0 own block   hop h: block of the rank h places before     (m, l, o): maximum, sum, output not yet divided
               m' = max(m, max s)   l' = l e^(m - m') + sum e^(s - m')   o' = o e^(m - m') + e^(s - m') v       out = o / l
    backward   do' = do / l   p = e^(s - m)   dv += pT do'   ds = p (do' vT - sum(do' out))   dq += ds k   dk += dsT q

The backward pass reads the saved out, m and l instead of m + log l: a query that sees no key has a maximum of -1e9, and adding log l to it
would be lost to rounding. Keys and values of the next hop are sent while a hop computes. dk and dv follow their block from rank to rank, so
each sum has a fixed order, and the rank of the last hop sends them to the block's owner. In causal attention a block goes to later ranks
only: a hop without visible keys has no node and no message.

In folded order (`rewrite/fold.py`) rank r has the chunks r and 2p-1-r of the tokens. All queries see the first half of an earlier rank's
keys and nothing of the second; the second half of the queries sees all keys of a later rank, the first half none. So each hop after hop 0
is half of the products of a block, on every rank:

    p = 2    rank 0: 0x0 3x0 3x3 (hop 0)  3x1 3x2 (hop 1)      rank 1: 1x1 2x1 2x2 (hop 0)  1x0 2x0 (hop 1)

Queries of a hop are computed in chunks, one after the other in a Scan, so memory has the scores of one chunk at a time. Heads of keys are
not repeated: queries are [batch, heads of keys, queries per head of keys, tokens, depth].

Operands of 16 bits are sent in 16 bits, as are the sums dk and dv, and cast to float32 where they are computed with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.normal import as_dim, normal
from partc.compiler.dims.reading import read
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.local_form import over_values
from partc.compiler.ir.programs import Comm, Compute, Event, Value
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.value_info import Shape, ValueInfo
from partc.compiler.lower.comm import CommLowering, computed
from partc.compiler.rewrite.precision import HALVES
from partc.compiler.sharding.values.operands import input_layout_of, output_layout_of
from partc.runtime.artifact import format as fmt

CHUNK = 128
"""The most queries in a chunk, if the number of tokens has a divisor that allows it."""
_WHOLE_BOX = (0, 1, 1)


def write_ring(comm: CommLowering, instance: NodeOnGroup) -> None:
    """Writes the forward pass of a node's ring, and stores the values that the backward pass reads in `comm.rings`."""
    ring = _Ring(comm, instance, comm.values.at[output_layout_of(comm.program, instance, 0)])
    comm.rings[instance] = ring.forward()


def write_ring_back(
    comm: CommLowering, instance: NodeOnGroup, dy: Value, gradients: Sequence[Value], of: Sequence[ir.Value]
) -> None:
    """Writes the backward pass of a node's ring.

    `dy`: the cotangent of the output. `gradients`: the values to write for queries, keys and values. `of`: the model's values of which
    `gradients` are the gradients.
    """
    out = comm.values.at[output_layout_of(comm.program, instance, 0)]
    _Ring(comm, instance, dy).backward(out, *comm.rings[instance], dy, gradients, of)


@dataclass
class _Nodes:
    """Builds a list of nodes whose operands are handles: names that `over_values` later replaces by values."""

    nodes: list[ir.Node] = field(default_factory=list)

    def __call__(self, op_type: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"v{len(self.nodes)}"
        kinds = ir.convenience.convert_attributes(attributes)
        made = ir.Value(name=name)
        self.nodes.append(ir.Node("", op_type, [ir.Value(name=one) for one in inputs], kinds, outputs=[made]))
        return name


@dataclass
class _Ring:
    """The ring of a node on its group; the values that it writes are named after `base`."""

    comm: CommLowering
    instance: NodeOnGroup
    base: Value
    tag: str = ""
    """The suffix of the names that are written: sets of ranks with different nodes get different names."""

    def __post_init__(self) -> None:
        program, node, group = self.comm.program, self.instance.node, self.instance.group
        choice = program.choices.get(self.instance)
        axes = choice.axes.get("s", ()) if choice is not None else ()
        self.sets: tuple[Group, ...] = tuple((rank,) for rank in group)
        if choice is not None and axes:
            self.sets = self.comm.subgroups(choice.mesh, axes, group)[0]
        self.size = len(self.sets[0])
        self.versions = [
            None if v is None else input_layout_of(program, self.instance, k) for k, v in enumerate(node.inputs)
        ]
        self.values = [None if version is None else self.comm.values.at[version] for version in self.versions]
        self.causal, self.scale = bool(node.attributes.get_int("causal", 0)), node.attributes.get_float("scale", 1.0)
        self.folded = self.causal and node.attributes.get_int("tokens", 0) > 1

    def shape(self, k: int) -> Shape:
        """The local shape of an operand."""
        version = self.versions[k]
        assert version is not None
        shape = self.comm.values.local_shape(version)
        assert shape is not None
        return shape

    @cached_property
    def heads(self) -> tuple[int, int]:
        """The heads of keys on a rank, and the heads of queries for each of them."""
        keys = int(self.shape(1)[1])
        return keys, int(self.shape(0)[1]) // keys

    @cached_property
    def sent(self) -> ir.DataType:
        """The type of all operands except the mask, in which blocks and their gradients are sent."""
        value = self.instance.node.inputs[0]
        assert value is not None
        assert value.dtype is not None
        return value.dtype

    @cached_property
    def dtype(self) -> ir.DataType:
        """The type in which the ring computes: float32 for operands of 16 bits."""
        return ir.DataType.FLOAT if self.sent in HALVES else self.sent

    def chunks(self, tokens: int | str) -> int:
        """The number of equal chunks of so many queries: the least with chunks of at most `CHUNK`, else the most."""
        facts = facts_of(tokens, {name: info.facts for name, info in self.comm.program.symbols.items()})
        divisor = tokens if isinstance(tokens, int) else facts.real_divisor()
        most = facts.max if facts.max is not None else CHUNK
        legal = [n for n in range(1, divisor + 1) if divisor % n == 0]
        return next((n for n in legal if n * CHUNK >= most), legal[-1])

    def ranks(self, places: Sequence[int]) -> Group:
        """The ranks at these places of their rings."""
        return tuple(ranks[place] for ranks in self.sets for place in places)

    def places(self, hop: int) -> range:
        """The places that compute in this hop."""
        return range(hop if self.causal and not self.folded else 0, self.size)

    def named(self, places: Sequence[int], hop: int) -> Group:
        """Returns the ranks at these places, and sets `tag` to the hop, followed by the place where places have different nodes."""
        self.tag = f"{hop}" if len(self.parts(hop)) == 1 else f"{hop}_{places[0]}"
        return self.ranks(places)

    # what is written

    def op(
        self,
        ranks: Group,
        op_type: str,
        inputs: Sequence[Value],
        word: str,
        block: str = "",
        result: Value | None = None,
        **attributes: Any,
    ) -> Value:
        """Writes a node with one result, and returns the result.

        `block`: the operand and the hop of the block that the node reads first, such as `k 2`, for the node's metadata; `k 2 half` where it
        takes a half of the tokens.
        """
        out = result or self.comm.job.derived_on(ranks, self.base, f".{word}{self.tag}")
        label = Value(f".{word}{self.tag}.{op_type.lower()}", self.base)
        step = computed(op_type, inputs, [out], label, self.instance.node, **attributes)
        step.node.metadata_props[fmt.HOP] = block or "-"
        self.comm.append(ranks, step)
        return out

    def number(self, ranks: Group, word: str, number: float) -> Value:
        return self.comm.constant(ranks, self.base, f"{word}{self.tag}", np.array(number, self.dtype.numpy()))

    def vector(self, ranks: Group, word: str, numbers: Sequence[int]) -> Value:
        return self.comm.constant(ranks, self.base, f"{word}{self.tag}", [*numbers])

    def typed(self, ranks: Group, value: Value, shape: Shape, kind: ir.DataType | None = None) -> Value:
        """Lists a value with its local shape; `kind`: its type, without it the one in which the ring computes."""
        kind = kind or self.dtype
        of = ir.Value(name=str(value), type=ir.TensorType(kind), shape=ir.Shape(shape))
        self.comm.values.add(of, ValueInfo(type_text(of.type), shape, kind.bitwidth // 8))
        self.comm.job.declare(ranks, value, of, shape)
        return value

    def cast(self, ranks: Group, value: Value, shape: Shape, word: str, kind: ir.DataType) -> Value:
        """Returns a value in the type `kind`, one of `sent` and `dtype`: the same value if these are one type."""
        if self.sent == self.dtype:
            return value
        return self.typed(ranks, self.op(ranks, "Cast", [value], word, to=int(kind)), shape, kind)

    def exchange(
        self,
        k: int,
        moved: Mapping[int, Value],
        results: Mapping[int, Value],
        to: Mapping[int, int],
        of: ir.Value,
        cause: str,
    ) -> None:
        """Writes the message that moves a block of operand `k` between places: `to` maps each sender's place to the receiver's.

        `moved`: maps each sender's place to the value that it sends. `results`: maps each receiver's place to the value that it receives.
        """
        if not to:
            return
        comm, shape, version = self.comm, self.shape(k), self.versions[k]
        assert version is not None
        sources = {target: source for source, target in to.items()}
        amount = comm.amount(version.value, Fraction(1, math.prod(version.layout.shards)))
        made = next(iter(results[place] for place in sources))
        among = [place for place in range(self.size) if place in to or place in sources]
        sets = tuple(tuple(ranks[place] for place in among) for ranks in self.sets)
        tag, group = len(comm.events), comm.group(sets)
        comm.events.append(Event(tag, fmt.EXCHANGE, of, made, sets, group, shape, amount, cause))
        box = _WHOLE_BOX * len(shape)
        for ranks in self.sets:
            for place, rank in enumerate(ranks):
                sends, receives = to.get(place), sources.get(place)
                if sends is None and receives is None:
                    continue
                said: dict[str, int | str | tuple[int, ...]] = {
                    fmt.GROUP: group,
                    fmt.SEND_PEERS: () if sends is None else (ranks[sends],),
                    fmt.SEND_BOXES: () if sends is None else box,
                    fmt.RECV_PEERS: () if receives is None else (ranks[receives],),
                    fmt.RECV_BOXES: () if receives is None else box,
                    fmt.RANK: len(shape),
                }
                inputs = () if sends is None else (moved[place],)
                outputs = () if receives is None else (results[place],)
                comm.append((rank,), Comm(fmt.EXCHANGE, inputs, outputs, said, tag, of, cause, amount))

    def passed(self, k: int, block: Value, hop: int, cause: str) -> Value:
        """Receives the block of operand `k` for a hop from the next-lower place, which had it (`block`) in the hop before."""
        to = {(place - 1) % self.size: place for place in self.places(hop)}
        ranks, version = self.ranks(self.places(hop)), self.versions[k]
        assert version is not None
        taken = self.comm.job.derived_on(ranks, self.base, f".{'qkv'[k]}{hop}")
        self.comm.job.declare(ranks, taken, self.comm.values.local_value(version), self.shape(k))
        self.exchange(k, dict.fromkeys(to, block), dict.fromkeys(self.places(hop), taken), to, version.value, cause)
        return taken

    def run(
        self,
        ranks: Group,
        nodes: _Nodes,
        values: Mapping[str, Value],
        scanned: Mapping[str, int],
        states: Mapping[str, str],
        results: Mapping[str, Value],
    ) -> None:
        """Writes nodes with `values` for their handles: once if there is one chunk, else in a Scan over the chunks.

        `scanned`: maps each handle that has the queries to the dim of the queries. `states`: maps the handle of a state before a chunk to
        its handle after it. `results`: maps handles to the result values; except for states, these have the queries in dim 3.
        """
        job, node = self.comm.job, self.instance.node
        first, dim = next(iter(scanned.items()))
        count = self.chunks((values[first].shape or ())[dim])
        if count == 1:
            inner = {
                str(one.outputs[0].name): job.derived_on(ranks, self.base, f".hop{self.tag}") for one in nodes.nodes
            }
            for ring_node in nodes.nodes:
                ring_node.metadata_props[fmt.HOP] = "-"
            self.comm.append(ranks, *over_values(nodes.nodes, node, {**inner, **values, **results}))
            return
        prefix = f"{self.comm.program.paths[node]}.chunk{self.tag}."
        chunked = {name: self._in_chunks(ranks, values[name], dim, name, count) for name, dim in scanned.items()}
        outer = [*[values[name] for name in states], *chunked.values()]
        own = {*states, *scanned, *[str(one.outputs[0].name) for one in nodes.nodes]}
        names = {name: f"{prefix}{name}" for name in own}
        kinds = {name: values[name].of for name in (*states, *scanned)}
        at = {
            name: ir.Value(name=names[name], type=ir.TensorType((of and of.dtype) or self.dtype))
            for name, of in kinds.items()
        }
        body = list[ir.Node]()
        for ring_node in nodes.nodes:
            inputs = [at.setdefault(str(v.name), ir.Value(name=str(v.name))) for v in ring_node.inputs if v is not None]
            out = ir.Value(name=names[str(ring_node.outputs[0].name)])
            body.append(ir.Node("", ring_node.op_type, inputs, [*ring_node.attributes.values()], outputs=[out]))
            at[str(ring_node.outputs[0].name)] = out
        ends = [*states.values(), *[name for name in results if name not in states.values()]]
        graph = ir.Graph(
            [at[name] for name in (*states, *scanned)], [at[name] for name in ends], nodes=body, name="chunk"
        )
        spread = len(ends) - len(states)
        wide = [job.derived_on(ranks, results[name], ".chunks") for name in ends[len(states) :]]
        for value, name in zip(wide, ends[len(states) :], strict=True):
            shape = results[name].shape
            assert shape is not None
            self.typed(ranks, value, (*shape[:3], count, _divided(shape[3], count), *shape[4:]))
        attributes = ir.convenience.convert_attributes(
            {
                "num_scan_inputs": len(scanned),
                "scan_input_axes": [*scanned.values()],
                "scan_output_axes": [3] * spread,
            }
        )
        outputs = (*[results[name] for name in states.values()], *wide)
        scan = ir.Node(
            "", "Scan", [None] * len(outer), [*attributes, ir.AttrGraph("body", graph)], num_outputs=len(outputs)
        )
        scan.metadata_props[fmt.HOP] = "-"
        captured = {name: value for name, value in values.items() if name not in own}
        label = Value(f".scan{self.tag}", self.base)
        self.comm.append(ranks, Compute(scan, node, tuple(outer), outputs, captured, label))
        for value, name in zip(wide, ends[len(states) :], strict=True):
            joined = self.vector(ranks, "joined", [0, *self.heads, -1, int(str((results[name].shape or ())[-1]))])
            self.op(ranks, "Reshape", [value, joined], f"joined_{name}", result=results[name])

    def _in_chunks(self, ranks: Group, value: Value, dim: int, name: str, count: int) -> Value:
        """Reshapes a value so that its dim of queries becomes two: the chunks, and the queries of a chunk."""
        shape = value.shape or ()
        if name == "mask":  # its last dim is the keys
            sizes = self.op(ranks, "Shape", [value], "sizes", start=-1)
            front = self.vector(ranks, "front", [0] * dim + [count, -1])
            target = self.op(ranks, "Concat", [front, sizes], "target", axis=0)
        else:
            head, last = ([0, *self.heads], [int(str(shape[-1]))]) if dim else ([], [])
            target = self.vector(ranks, "chunked", [*head, count, -1, *last])
        chunked = self.op(ranks, "Reshape", [value, target], "chunks")
        assert value.of is not None
        dims = (*shape[:dim], count, _divided(shape[dim], count), *shape[dim + 1 :])
        of = ir.Value(name=str(chunked), type=value.of.type, shape=ir.Shape(dims))
        self.comm.values.add(of, replace(self.comm.values[value.of], shape=dims))
        self.comm.job.declare(ranks, chunked, of, dims)
        return chunked

    # operands

    def wide(self, ranks: Group, value: Value, depth: int, word: str) -> Value:
        """Reshapes queries, or values of their shape, to five dims: dim 1 is the heads of keys, dim 2 the heads of queries for each."""
        target = self.vector(ranks, "wide", [0, *self.heads, -1, depth])
        shape = self.shape(0)
        value = self.cast(ranks, value, (*shape[:3], depth), f"{word}_exact", self.dtype)
        made = self.op(ranks, "Reshape", [value, target], word)
        return self.typed(ranks, made, (shape[0], *self.heads, shape[2], depth))

    def apart(self, ranks: Group, value: Value, word: str, block: str, *, turned: bool) -> Value:
        """Inserts a dim of 1 into keys or values, to broadcast them over the heads of queries; transposes the last two dims if `turned`."""
        hop = f"{block} {self.tag}{' fold' if self.folded else ' causal' if self.causal else ''}"
        block5 = self.op(ranks, "Unsqueeze", [value, self.vector(ranks, "two", [2])], f"{word}5", hop)
        batch, groups, tokens, depth = self.shape("qkv".index(block))
        block5 = self.cast(ranks, block5, (batch, groups, 1, tokens, depth), f"{word}_exact", self.dtype)
        if not turned:
            return self.typed(ranks, block5, (batch, groups, 1, tokens, depth))
        block5 = self.op(ranks, "Transpose", [block5], word, perm=[0, 1, 2, 4, 3])
        return self.typed(ranks, block5, (batch, groups, 1, depth, tokens))

    def rows(self) -> Value:
        """The places of a rank's queries within its shard of the tokens: 0, 1, ..."""
        ranks, tokens = self.instance.group, self.shape(0)[2]
        size = self.op(ranks, "Shape", [self._operand(0)], "tokens", start=2, end=3)
        axis = self.vector(ranks, "first", [0])
        zero, one = (
            self.comm.constant(ranks, self.base, word, np.array(n, np.int64)) for word, n in (("zero", 0), ("one", 1))
        )
        made = self.op(ranks, "Range", [zero, self.op(ranks, "Squeeze", [size, axis], "count"), one], "rows")
        of = ir.Value(name=str(made), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([tokens]))
        self.comm.values.add(of, ValueInfo("tensor(int64)", (tokens,), 8))
        self.comm.job.declare(ranks, made, of, (tokens,))
        return made

    def _operand(self, k: int) -> Value:
        value = self.values[k]
        assert value is not None
        return value

    def masked(self, nodes: _Nodes, ranks: Group, hop: int, values: dict[str, Value], scanned: dict[str, int]) -> str:
        """Writes the nodes of a hop's masked scores, and returns the handle of these; adds the operands to `values` and `scanned`."""
        scores = nodes("MatMul", "q", "kt")
        if self.causal:
            if hop:
                return scores
            values |= {
                "rows": self.rows(),
                "last": self.vector(ranks, "last", [1]),
                "never": self.number(ranks, "never", -np.inf),
            }
            values["keys"] = values["rows"]
            if self.chunks(self.shape(0)[2]) > 1:  # rows of a chunk, and all keys
                values["keys"] = self.op(ranks, "Identity", [values["rows"]], "keys")
                scanned["rows"] = 0
            seen = nodes("LessOrEqual", "keys", nodes("Unsqueeze", "rows", "last"))
            return nodes("Where", seen, scores, "never")
        if "mask" not in values:
            return scores
        chunks = self.chunks(self.shape(0)[2])
        if values["mask"].shape is not None and self._queries_of_mask() is not None and chunks > 1:
            scanned["mask"] = self._queries_of_mask() or 0
        if not self.is_hiding:
            return nodes("Add", scores, "mask")
        values["hidden"] = self.number(ranks, "hidden", self.instance.node.attributes.get_float("hidden", 0.0))
        return nodes("Where", "mask", scores, "hidden")

    @property
    def is_hiding(self) -> bool:
        """Whether the mask has booleans."""
        mask = self.instance.node.inputs[3] if len(self.instance.node.inputs) > 3 else None
        return mask is not None and mask.dtype == ir.DataType.BOOL

    def _queries_of_mask(self) -> int | None:
        """The dim of the queries in a mask of five dims; None if all queries share one mask."""
        shape = self.shape(3)
        return None if len(shape) < 2 or shape[-2] == 1 else (len(shape) - 2 if len(shape) < 4 else 3)

    def block_of_mask(self, place: int, hop: int) -> dict[str, Value]:
        """Writes the slice of the mask with the keys that a place reads in a hop, in five dims; empty without a mask."""
        if len(self.values) < 4 or self.values[3] is None:
            return {}
        ranks, shape, value = self.ranks([place]), self.shape(3), self._operand(3)
        if len(shape) > 3:
            value = self.op(ranks, "Unsqueeze", [value, self.vector(ranks, "two", [2])], "mask5")
            shape = (*shape[:2], 1, *shape[2:])
        if shape[-1] != 1 and self.size > 1:
            size = self.op(ranks, "Shape", [self._operand(1)], "tokens", start=2, end=3)
            block = (place - hop) % self.size
            begin, end = (
                self.op(ranks, "Mul", [size, self.vector(ranks, "block", [number])], "bound")
                for number in (block, block + 1)
            )
            value = self.op(ranks, "Slice", [value, begin, end, self.vector(ranks, "axis", [-1])], "mask")
            shape = (*shape[:-1], _divided(shape[-1], self.size))
        mask = self.instance.node.inputs[3]
        assert mask is not None
        if value.of is None:
            of = ir.Value(name=str(value), type=mask.type, shape=ir.Shape(shape))
            self.comm.values.add(of, ValueInfo(type_text(mask.type), shape, 1))
            self.comm.job.declare(ranks, value, of, shape)
        return {"mask": self.cast(ranks, value, shape, "mask_exact", self.dtype) if mask.dtype == self.sent else value}

    def parts(self, hop: int) -> list[Sequence[int]]:
        """Groups the places of a hop by the nodes that they run: one set, or one for each place if the mask's slice differs by place.

        In folded order a place that reads a later rank's block is alone: its state is that of its own hops.
        """
        places = self.places(hop)
        if self.folded and hop:
            return [places[hop:], *([place] for place in places[:hop])]
        return (
            [[place] for place in places]
            if len(self.values) > 3 and self.values[3] is not None
            else [places]
            if places
            else []
        )

    def half(self, ranks: Group, value: Value, dim: int, word: str, block: str = "", *, second: bool = False) -> Value:
        """Returns a half of a value along its dim of tokens; `block`: as in `op`."""
        tokens = self.op(ranks, "Shape", [value], f"{word}_tokens", start=dim, end=dim + 1)
        middle = self.op(ranks, "Div", [tokens, self.vector(ranks, "two_halves", [2])], f"{word}_middle")
        bounds = [middle, tokens] if second else [self.vector(ranks, "begin", [0]), middle]
        axis, hop = self.vector(ranks, f"dim{dim}", [dim]), self.tag.partition("_")[0]
        made = self.op(ranks, "Slice", [value, *bounds, axis], f"{word}_half", block and f"{block} {hop} half")
        shape = value.shape
        return (
            made
            if shape is None
            else self.typed(ranks, made, (*shape[:dim], _divided(shape[dim], 2), *shape[dim + 1 :]))
        )

    def joined(self, ranks: Group, first: Value, second: Value, dim: int, word: str, shape: Shape) -> Value:
        """Returns two halves as one value of this shape."""
        return self.typed(ranks, self.op(ranks, "Concat", [first, second], f"{word}_joined", axis=dim), shape)

    def zeros(self, ranks: Group, like: Value, word: str) -> Value:
        """Returns zeros in the shape of a value."""
        sizes = self.op(ranks, "Shape", [like], f"{word}_sizes")
        empty = ir.tensor(np.zeros(1, self.dtype.numpy()))
        return self.typed(
            ranks, self.op(ranks, "ConstantOfShape", [sizes], f"{word}_zeros", value=empty), like.shape or ()
        )

    # the two passes

    def queries(self) -> Value:
        """Writes the queries in five dims, multiplied by the scale."""
        ranks, depth = self.instance.group, int(self.shape(0)[3])
        made = self.wide(ranks, self._operand(0), depth, "q5")
        if self.scale == 1.0:
            return made
        scaled = self.op(ranks, "Mul", [made, self.number(ranks, "scale", self.scale)], "qs")
        return self.typed(ranks, scaled, made.shape or ())

    def forward(self) -> tuple[Value, Value]:
        """Writes the forward pass; returns the maximum and the sum of each query's scores, in five dims."""
        everyone, (groups, each) = self.instance.group, self.heads
        query, tokens, depth = self.queries(), self.shape(0)[2], int(self.shape(2)[3])
        narrow, wide = (self.shape(0)[0], groups, each, tokens, 1), (self.shape(0)[0], groups, each, tokens, depth)
        cause = f"block of '{self.comm.program.paths[self.instance.node]}' in a ring ({self._why})"
        key, value = self._operand(1), self._operand(2)
        state: dict[int, dict[str, Value]] = {place: {} for place in range(self.size)}
        for hop in range(self.size):
            following = (
                (self.passed(1, key, hop + 1, cause), self.passed(2, value, hop + 1, cause))
                if hop + 1 < self.size
                else None
            )
            self.tag, ranks = str(hop), self.ranks(self.places(hop))
            kt, v = self.apart(ranks, key, "kt", "k", turned=True), self.apart(ranks, value, "v", "v", turned=False)
            for places in self.parts(hop):
                hop_places, nodes = self.named(places, hop), _Nodes()
                values = {"q": query, "kt": kt, "v": v, **self.block_of_mask(places[0], hop)}
                scanned, before = {"q": 3}, state[places[0]]
                if self.folded and hop > places[0]:
                    values["q"] = self.half(hop_places, query, 3, "q", "q", second=True)
                    before = {name: self.half(hop_places, one, 3, name, second=True) for name, one in before.items()}
                elif self.folded and hop:
                    values |= {
                        "kt": self.half(hop_places, kt, 4, "kt", "k"),
                        "v": self.half(hop_places, v, 3, "v", "v"),
                    }
                scores = self.masked(nodes, hop_places, hop, values, scanned)
                values["axis"] = self.vector(hop_places, "axis", [-1])
                top = nodes("ReduceMax", scores, "axis", out="" if hop else "m2")
                if hop:
                    values |= before
                    scanned |= dict.fromkeys(("m", "l", "o"), 3)
                    top = nodes("Max", "m", top, out="m2")
                least = top
                if not self.causal and "mask" in values:
                    values["zero"] = self.number(hop_places, "none", 0)
                    least = nodes("Where", nodes("IsInf", top), "zero", top)
                shares = nodes("Exp", nodes("Sub", scores, least))
                added = nodes("ReduceSum", shares, "axis", out="" if hop else "l2")
                mixed = nodes("MatMul", shares, "v", out="" if hop else "o2")
                if hop:
                    kept = nodes("Exp", nodes("Sub", "m", least))
                    nodes("Add", nodes("Mul", "l", kept), added, out="l2")
                    nodes("Add", nodes("Mul", "o", kept), mixed, out="o2")
                rows = (values["q"].shape or ())[3]
                states = {
                    name: self.typed(
                        hop_places,
                        self.comm.job.derived_on(hop_places, self.base, f".{name[0]}{self.tag}"),
                        (*shape[:3], rows, shape[4]),
                    )
                    for name, shape in (("m2", narrow), ("l2", narrow), ("o2", wide))
                }
                self.run(hop_places, nodes, values, scanned, {}, states)
                if rows != tokens:  # the other half sees nothing of the block
                    for name, second in states.items():
                        whole = state[places[0]][name[0]]
                        first = self.half(hop_places, whole, 3, f"{name[0]}_kept")
                        states[name] = self.joined(hop_places, first, second, 3, name[0], whole.shape or ())
                for place in places:
                    state[place] = {name[0]: one for name, one in states.items()}
            if following:
                key, value = following
        most = self.typed(everyone, self.comm.job.derived_on(everyone, self.base, ".most"), narrow)
        total = self.typed(everyone, self.comm.job.derived_on(everyone, self.base, ".total"), narrow)
        for places in self.last_hops():
            self.tag = "" if len(places) == self.size else f"_{places[0]}"
            self._finish(self.ranks(places), state[places[0]], most, total)
        return most, total

    def last_hops(self) -> list[Sequence[int]]:
        """Groups the places by the hop that completes their result."""
        return [[place] for place in range(self.size)] if self.causal or len(self.values) > 3 else [range(self.size)]

    def _finish(self, ranks: Group, state: Mapping[str, Value], most: Value, total: Value) -> None:
        """Writes the result from the last state; a query that sees no key gets zeros, and adds nothing to any gradient."""
        if self.causal or len(self.values) < 4:
            self.op(ranks, "Identity", [state["m"]], "most", result=most)
            self.op(ranks, "Identity", [state["l"]], "total", result=total)
        else:
            zero, unit = self.number(ranks, "none", 0), self.number(ranks, "whole", 1)
            unseen, nothing = (
                self.op(ranks, "IsInf", [state["m"]], "unseen"),
                self.op(ranks, "Equal", [state["l"], zero], "nothing"),
            )
            self.op(ranks, "Where", [unseen, zero, state["m"]], "most", result=most)
            self.op(ranks, "Where", [nothing, unit, state["l"]], "total", result=total)
        out = self.op(ranks, "Div", [state["o"], total], "out5")
        out = self.cast(ranks, out, state["o"].shape or (), "out_sent", self.sent)
        groups, each = self.heads
        target = self.vector(ranks, "joined", [0, groups * each, -1, int(self.shape(2)[3])])
        self.op(ranks, "Reshape", [out, target], "out", result=self.base)
        version = output_layout_of(self.comm.program, self.instance, 0)
        self.comm.job.declare(
            ranks, self.base, self.comm.values.local_value(version), self.comm.values.local_shape(version)
        )

    @property
    def _why(self) -> str:
        choice = self.comm.program.choices.get(self.instance)
        return "" if choice is None else choice.why.get("s", "")

    def backward(
        self, out: Value, most: Value, total: Value, dy: Value, gradients: Sequence[Value], of: Sequence[ir.Value]
    ) -> None:
        """Writes the backward pass; `out`, `most` and `total` are the saved output, maxima and sums."""
        everyone, (groups, each), path = self.instance.group, self.heads, self.comm.program.paths[self.instance.node]
        tokens, depth, width = self.shape(0)[2], int(self.shape(0)[3]), int(self.shape(2)[3])
        narrow = (self.shape(0)[0], groups, each, tokens, 1)
        cause = f"gradient of '{path}' in a ring"
        query, shape = self.queries(), (*narrow[:-1], width)
        do = self.typed(everyone, self.op(everyone, "Div", [self.wide(everyone, dy, width, "dy5"), total], "do"), shape)
        product = self.op(everyone, "Mul", [do, self.wide(everyone, out, width, "out5")], "weighed")
        delta = self.op(everyone, "ReduceSum", [product, self.vector(everyone, "last_axis", [-1])], "delta")
        self.typed(everyone, delta, narrow)
        key, value = self._operand(1), self._operand(2)
        dq: dict[int, Value] = {}
        sums: dict[int, tuple[Value, Value]] = {}
        for hop in range(self.size):
            places = self.places(hop)
            following = (
                (self.passed(1, key, hop + 1, cause), self.passed(2, value, hop + 1, cause))
                if hop + 1 < self.size
                else None
            )
            arriving = self._sums_passed(hop, sums, of, cause) if hop else {}
            self.tag, ranks = str(hop), self.ranks(places)
            kt, vt = self.apart(ranks, key, "kt", "k", turned=True), self.apart(ranks, value, "vt", "v", turned=True)
            k = self.apart(ranks, key, "k", "k", turned=False)
            sums = {}
            for hop_places in self.parts(hop):
                there, nodes = self.named(hop_places, hop), _Nodes()
                values = {
                    "q": query,
                    "kt": kt,
                    "k": k,
                    "vt": vt,
                    "do": do,
                    "most": most,
                    "delta": delta,
                    **self.block_of_mask(hop_places[0], hop),
                }
                scanned, halved = dict.fromkeys(("q", "do", "most", "delta"), 3), self.folded and hop > 0
                by_queries = halved and hop > hop_places[0]
                if by_queries:
                    values |= {name: self.half(there, values[name], 3, name, "q", second=True) for name in scanned}
                elif halved:
                    values |= {
                        name: self.half(there, values[name], dim, name, name[0])
                        for name, dim in (("kt", 4), ("vt", 4), ("k", 3))
                    }
                scores = self.masked(nodes, there, hop, values, scanned)
                values["two"] = self.vector(there, "two", [2])
                p = nodes("Exp", nodes("Sub", scores, "most"))
                over = nodes(
                    "ReduceSum", nodes("MatMul", nodes("Transpose", p, perm=[0, 1, 2, 4, 3]), "do"), "two", keepdims=0
                )
                nodes("Add", "dv", over, out="dv2")
                ds = nodes("Mul", p, nodes("Sub", nodes("MatMul", "do", "vt"), "delta"))
                if self.is_hiding:
                    values["zero"] = self.number(there, "none", 0)
                    ds = nodes("Where", "mask", ds, "zero")
                nodes("MatMul", ds, "k", out="dq")
                over = nodes(
                    "ReduceSum", nodes("MatMul", nodes("Transpose", ds, perm=[0, 1, 2, 4, 3]), "q"), "two", keepdims=0
                )
                nodes("Add", "dk", over, out="dk2")
                dq_out = self.comm.job.derived_on(there, self.base, f".dq{self.tag}")
                results = {"dq": self.typed(there, dq_out, values["q"].shape or ())}
                for k_, name in ((1, "dk"), (2, "dv")):
                    values[name] = zeros = self.zeros(there, self._operand(k_), name)
                    if halved and not by_queries:
                        values[name] = self.half(there, zeros, 2, name)
                    out = self.comm.job.derived_on(there, self.base, f".{name}{self.tag}")
                    results[f"{name}2"] = self.typed(there, out, values[name].shape or ())
                self.run(there, nodes, values, scanned, {"dk": "dk2", "dv": "dv2"}, results)
                if by_queries:
                    nothing = self.zeros(there, results["dq"], "dq")
                    results["dq"] = self.joined(there, nothing, results["dq"], 3, "dq", query.shape or ())
                elif halved:  # the keys' second half is seen by none
                    results |= {
                        name: self.joined(there, results[name], values[name[:2]], 2, name, self.shape(k_))
                        for k_, name in ((1, "dk2"), (2, "dv2"))
                    }
                for place in hop_places:
                    self.tag, one = f"{hop}_{place}", self.ranks([place])
                    dk, dv = (
                        self.cast(
                            one,
                            self.added(one, arriving.get(place), k_, results[f"{word}2"]),
                            self.shape(k_),
                            f"{word}_sent",
                            self.sent,
                        )
                        for k_, word in ((1, "dk"), (2, "dv"))
                    )
                    sums[place] = dk, dv
                    before = dq.get(place)
                    dq[place] = (
                        results["dq"]
                        if before is None
                        else self.op(self.ranks([place]), "Add", [before, results["dq"]], "dq_sum")
                    )
            self._home(hop, sums, gradients, of, cause)
            if following:
                key, value = following
        target = self.vector(everyone, "joined", [0, groups * each, -1, depth])
        for place in range(self.size):
            self.tag, ranks, found = f"_{place}", self.ranks([place]), dq[place]
            if self.scale != 1.0:
                found = self.op(ranks, "Mul", [found, self.number(ranks, "scale", self.scale)], "dq_scaled")
            found = self.cast(ranks, found, query.shape or (), "dq_sent", self.sent)
            self.op(ranks, "Reshape", [found, target], "dq", result=gradients[0])

    def added(self, ranks: Group, arriving: tuple[Value, Value] | None, k: int, own: Value) -> Value:
        """Adds a rank's gradient of a block of operand `k` to the sum that arrives with the block."""
        if arriving is None:
            return own
        word, shape = f"d{'qkv'[k]}", self.shape(k)
        before = self.cast(ranks, arriving[k - 1], shape, f"{word}_exact", self.dtype)
        return self.typed(ranks, self.op(ranks, "Add", [before, own], f"{word}_sum"), shape)

    def _sums_passed(
        self, hop: int, sums: Mapping[int, tuple[Value, Value]], of: Sequence[ir.Value], cause: str
    ) -> dict[int, tuple[Value, Value]]:
        """Receives the partial sums dk and dv of the blocks that places have in a hop; they travel with the blocks."""
        to = {(place - 1) % self.size: place for place in self.places(hop)}
        ranks = self.ranks(self.places(hop))
        taken = []
        for k, word in ((1, "dk"), (2, "dv")):
            value = self.comm.job.derived_on(ranks, self.base, f".{word}_in{hop}")
            value = self.typed(ranks, value, self.shape(k), self.sent)
            moved = {source: sums[source][k - 1] for source in to}
            self.exchange(k, moved, dict.fromkeys(self.places(hop), value), to, of[k], cause)
            taken.append(value)
        return dict.fromkeys(self.places(hop), (taken[0], taken[1]))

    def _home(
        self,
        hop: int,
        sums: Mapping[int, tuple[Value, Value]],
        gradients: Sequence[Value],
        of: Sequence[ir.Value],
        cause: str,
    ) -> None:
        """Sends dk and dv of the blocks that no later hop reads to the ranks that own the blocks."""
        going = {(place - 1) % self.size for place in self.places(hop + 1)} if hop + 1 < self.size else set()
        ending = {place: (place - hop) % self.size for place in self.places(hop) if place not in going}
        for k in (1, 2):
            to = {place: home for place, home in ending.items() if place != home}
            for place in ending.keys() - to.keys():
                self.op(
                    self.ranks([place]), "Identity", [sums[place][k - 1]], f"d{'qkv'[k]}_{place}", result=gradients[k]
                )
            version = self.versions[k]
            assert version is not None
            self.exchange(
                k, {p: sums[p][k - 1] for p in to}, dict.fromkeys(to.values(), gradients[k]), to, of[k], cause
            )


def _divided(size: int | str, count: int) -> int | str:
    """Returns a size divided by `count`, as a number or an expression; `count` divides it."""
    if isinstance(size, int):
        return size // count
    one = read(size)
    found = None if one is None else as_dim(normal(one / count, {}))
    return size if found is None else found if isinstance(found, int) else str(found.value)
