"""What an artifact's ranks do and need, in numbers: nodes, segments, weights, memory, bytes moved.

Bytes moved are those of messages and of collectives, of which a rank gets as many as it sends: sums of expressions in the symbols
(`28*batch + 32`) and their value at chosen sizes. Peak memory is an estimate: the weights, what training keeps beside them, and the
largest set of other values alive at one node in the order of the file; what is updated in place takes no room of its own, and
values whose size only a run tells are counted apart.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from partc.cli.output.training_stats import kept_bytes
from partc.runtime.artifact.dim_expression import parse
from partc.runtime.artifact.dtypes import BY_CODE
from partc.runtime.artifact.format import ALL_REDUCE, BYTES, DOMAIN, OPTIMIZER, TAG, Collective, Manifest
from partc.runtime.artifact.manifest import Artifact
from partc.runtime.artifact.onnx_graph import reads
from partc.runtime.artifact.row_function import MERGE
from partc.runtime.artifact.tasks import unrolled
from partc.runtime.execution.symbol_bindings import smallest

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto, ValueInfoProto
    from partc.runtime.program.steps import Step

_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Moved:
    """Bytes of some transfers: the sum as an expression, its value at chosen sizes, and how many have no known size."""

    text: str
    bytes: int
    unknown: int


@dataclass(frozen=True)
class RankStats:
    """The numbers of one rank."""

    rank: int
    nodes: int
    segments: int
    sessions: int
    weights: int
    peak: int
    unknown_values: int
    sent: Moved
    received: Moved


def typical_sizes(manifest: Manifest) -> dict[str, int]:
    """The size of each symbol at which estimates are made: the largest where one is given, else the smallest."""
    return {
        name: smallest(symbol) if symbol.max is None else symbol.max - (symbol.max - symbol.remainder) % symbol.divisor
        for name, symbol in manifest.symbols.items()
    }


def rank_stats(artifact: Artifact, rank: int, sizes: Mapping[str, int]) -> RankStats:
    """The numbers of a rank, with the symbols at these sizes."""
    from partc.runtime.program.segmentation import segmented
    from partc.runtime.program.steps import Segment

    file = artifact.model(rank)
    model, manifest = unrolled(file), artifact.manifest
    transfers = manifest.transfers
    collectives = list(_collectives(model, manifest))
    steps = segmented(file, manifest.program(rank), guard=manifest.guard)
    state = {record.value for record in manifest.state if rank in record.ranks}
    kept = kept_bytes(manifest, rank)
    weights = sum(tensor_bytes(tensor) for tensor in model.graph.initializer if tensor.name not in state)
    weights += kept["parameter"] + kept["statistics"]
    live, unknown = largest_live_set(model, sizes, state | updated_in_place(steps))
    return RankStats(
        rank=rank,
        nodes=sum(node.domain != DOMAIN for node in model.graph.node),
        segments=sum(isinstance(step, Segment) for step in steps),
        sessions=len({id(step.formal) for step in steps if isinstance(step, Segment)}),
        weights=weights,
        peak=weights + kept["optimizer"] + live,
        unknown_values=unknown,
        sent=moved([*(one for one in transfers if one.source == rank), *collectives], sizes),
        received=moved([*(one for one in transfers if one.target == rank), *collectives], sizes),
    )


def updated_in_place(steps: Iterable[Step]) -> set[str]:
    """What updates make, which lies where the old value did."""
    from partc.runtime.program.steps import Update

    return {name for step in steps if isinstance(step, Update) for node in step.nodes for name in node.output}


def _collectives(model: ModelProto, manifest: Manifest) -> Iterator[Collective]:
    """The collectives of a rank, each with the bytes that the rank's own node states."""
    records = {one.tag: one for one in manifest.collectives}
    for node in model.graph.node if records else ():
        tag = next((attribute.i for attribute in node.attribute if attribute.name == TAG), -1)
        if node.domain == DOMAIN and tag in records:
            stated = next((entry.value for entry in node.metadata_props if entry.key == BYTES), records[tag].bytes)
            yield records[tag].model_copy(update={"bytes": stated})


class HasBytes(Protocol):
    """What moves bytes, an expression in the symbols."""

    @property
    def bytes(self) -> str:
        """How many."""
        ...


def moved(transfers: Iterable[HasBytes], sizes: Mapping[str, int]) -> Moved:
    """The bytes of these messages, collectives or copies together."""
    terms: Counter[str] = Counter()
    unknown = 0
    for transfer in transfers:
        if transfer.bytes == _UNKNOWN:
            unknown += 1
        else:
            terms.update(_terms(transfer.bytes))
    parts = [
        _term(factor, number) for factor, number in sorted(terms.items(), key=lambda term: (term[0] == "", term[0]))
    ]
    parts += [f"{unknown} unknown"] if unknown else []
    total = sum(number * (parse(factor).exact(sizes) if factor else 1) for factor, number in terms.items())
    return Moved(" + ".join(parts) or "0", math.ceil(total), unknown)


def _term(factor: str, number: int) -> str:
    return str(number) if not factor else factor if number == 1 else f"{number}*{factor}"


def _terms(text: str) -> dict[str, int]:
    """An expression as a sum of whole multiples: `28*batch + 32` is `{"batch": 28, "": 32}`."""
    sums: Counter[str] = Counter()
    pending = [ast.parse(text, mode="eval").body]
    while pending:
        match pending.pop():
            case ast.BinOp(left, ast.Add(), right):
                pending += [right, left]
            case term:
                number, factors = _factors(term)
                sums["*".join(sorted(factors))] += number
    return sums


def _factors(term: ast.expr) -> tuple[int, list[str]]:
    match term:
        case ast.Constant(int(number)):
            return number, []
        case ast.BinOp(left, ast.Mult(), right):
            (first, some), (second, others) = _factors(left), _factors(right)
            return first * second, some + others
        case ast.BinOp():
            return 1, [f"({ast.unparse(term)})"]
        case _:
            return 1, [ast.unparse(term)]


def tensor_bytes(tensor: TensorProto) -> int:
    """The bytes of a weight."""
    dtype = BY_CODE.get(tensor.data_type)
    if dtype is None:
        return sum(len(text) for text in tensor.string_data)
    return dtype.bytes_of(tuple(tensor.dims))


def largest_live_set(model: ModelProto, sizes: Mapping[str, int], apart: Collection[str]) -> tuple[int, int]:
    """Bytes of the largest set of values alive at once, and the number of values of unknown size that it leaves out.

    Values in `apart`, and weights, are counted elsewhere.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer} | {*apart}
    known = {port.name: _value_bytes(port, sizes) for port in [*graph.value_info, *graph.input, *graph.output]}
    for node in graph.node:
        if node.domain == OPTIMIZER and node.op_type == MERGE:  # at most as many distinct rows as there are rows
            known |= {made: known.get(source) for source, made in zip(node.input, node.output, strict=True)}
    end = len(graph.node)
    last = {port.name: end for port in graph.output}
    for at, node in enumerate(graph.node):
        for name in reads(node):
            last[name] = max(last.get(name, 0), at)
    for node in graph.node:
        if node.domain == DOMAIN and node.op_type == ALL_REDUCE and len(node.input) > 1:
            # what several values become lies where they do
            for source, result in zip(node.input, node.output, strict=True):
                last[source] = max(last[source], last.get(result, 0))
                weights.add(result)
    freed: dict[int, int] = {}
    alive = unknown = peak = 0

    def begin(name: str, at: int) -> None:
        nonlocal alive, unknown
        size = known.get(name)
        unknown += size is None
        alive += size or 0
        until = last.get(name, at)
        freed[until] = freed.get(until, 0) + (size or 0)

    for port in graph.input:
        if port.name not in weights:
            begin(port.name, 0)
    for at, node in enumerate(graph.node):
        for name in node.output:
            if name and name not in weights:
                begin(name, at)
        peak = max(peak, alive)
        alive -= freed.pop(at, 0)
    return max(peak, alive), unknown


def _value_bytes(port: ValueInfoProto, sizes: Mapping[str, int]) -> int | None:
    """The bytes of a declared tensor; None where its type or a dim is not known."""
    tensor = port.type.tensor_type
    dtype = BY_CODE.get(tensor.elem_type)
    if dtype is None or not tensor.HasField("shape"):
        return None
    shape = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value"):
            shape.append(dim.dim_value)
            continue
        try:
            shape.append(parse(dim.dim_param, sizes)(sizes))
        except ValueError:
            return None
    return dtype.bytes_of(tuple(shape))
