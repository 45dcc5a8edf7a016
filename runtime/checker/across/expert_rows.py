"""Proves that rows that came by a Route meet their experts' matrices, and are in their order again where a Return sends them.

    order = TopK(experts * count + place)      sorted = Gather(rows, order)      rows0, rows1, .. = Split(sorted, rows of each expert)
    y_k = MatMul(rows_k, matrix k)             y = ScatterND(zeros, order, Concat(y_0, y_1, ..))

All orders of the same rows have the same type and shape, and so have the matrices of all experts, so no other check would report one in
place of another. The states of a value: rows as they came, sorted, or those of one expert; or one matrix of a stack, or its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import ModelProto, NodeProto
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.dim_expression import symbols_in
from partc.runtime.artifact.format import DOMAIN, RETURN, ROUTE, TAG
from partc.runtime.artifact.graph.onnx_graph import integer_of, node_title, path_of
from partc.runtime.checker.across.call_node import AGAIN, CallNode
from partc.runtime.checker.graph.declared import ValueType
from partc.runtime.errors import Violation

_CAME = ""
_PRODUCTS = ("Gemm", "MatMul", "MatMulNBits")


@dataclass(frozen=True)
class _Rows:
    """Rows that came by the Route that made `experts`, sorted by `order`, or as they came; of one expert, or of all."""

    experts: str
    order: str = _CAME
    part: int | None = None

    def __str__(self) -> str:
        if self.part is not None:
            return f"the rows of expert {self.part}"
        return f"rows sorted by '{self.order}'" if self.order else "rows as they came"


def check_expert_rows(
    file: str,
    model: ModelProto,
    types: Mapping[str, ValueType],
    calls: Sequence[CallNode],
    symbols: Collection[str],
) -> Iterator[Violation]:
    """Yields every node of a rank file that takes rows of experts in another order, to another expert, or as rows of a known number.

    `symbols`: those of the manifest.
    """
    lookups = {node.call.tag: node.call for node in calls if isinstance(node.call, LookupCall)}
    if any(call.op == ROUTE for call in lookups.values()):
        yield from _File(file, model, types, lookups, symbols).violations()


class _File:
    def __init__(
        self,
        file: str,
        model: ModelProto,
        types: Mapping[str, ValueType],
        lookups: Mapping[int, LookupCall],
        symbols: Collection[str],
    ) -> None:
        self.file, self.nodes, self.types, self.lookups = file, model.graph.node, types, lookups
        self.symbols = {*symbols}
        """The symbols whose sizes each step knows before it begins."""
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.counts: dict[str, int] = {}
        """Maps the experts of a Route to how many a rank has."""
        self.rows: dict[str, _Rows] = {}
        self.matrices: dict[str, int] = {}
        """Maps a matrix of a stack to its place there."""
        self.gradients: dict[str, int] = {}
        """Maps a matrix's gradient to its expert."""
        self.orders: dict[str, str] = {}
        """Maps each order to the experts that it sorts by."""
        self.rules: Mapping[str, Callable[[NodeProto], str | None]] = {
            "Concat": self._concat,
            "Gather": self._gather,
            "GatherND": self._gather,
            "ScatterND": self._scatter,
            "Split": self._split,
            "TopK": self._sort,
            **dict.fromkeys(_PRODUCTS, self._multiply),
        }

    def violations(self) -> Iterator[Violation]:
        sent: dict[str | None, str] = {}
        for node in self.nodes:
            call = self.lookups.get(integer_of(node, TAG, -1)) if node.domain == DOMAIN else None
            if call is not None and call.op in (ROUTE, RETURN):
                experts = (call.numbers or "") if call.asks else sent.get(call.requests[0], "")
                fact = self._send(call, experts, sent)
            else:
                fact = self.rules.get(node.op_type, self._compute)(node)
            if fact:
                yield Violation(self.file, fact, node_title(node), path_of(node), AGAIN)

    def _send(self, call: LookupCall, experts: str, sent: dict[str | None, str]) -> str | None:
        if call.op == RETURN:
            state = self.rows.get(call.operand or "")
            return f"it sends back {state}" if state is not None and state != _Rows(experts) else None
        if call.asks:
            sent[call.requests[0]] = experts
            self.counts[experts] = call.rows_of_owner
        self.rows |= {name: _Rows(experts) for name in (call.result, call.numbers) if name}
        self.symbols -= self._symbols_of(call.result or "")
        return None

    def _symbols_of(self, name: str) -> set[str]:
        """The symbols in a value's declared shape."""
        return {symbol for dim in self.types.get(name, ("", None))[1] or () for symbol in symbols_in(dim, self.symbols)}

    def _sort(self, node: NodeProto) -> str | None:
        """Records an order by unique keys: an expert times the number of rows, and a row's place."""
        key = self.makers.get(node.input[0])
        terms = [self.makers.get(name) for name in key.input] if key is not None and key.op_type == "Add" else []
        if {one.op_type for one in terms if one is not None} == {"Mul", "Range"} and not integer_of(node, "largest", 1):
            (major,) = (one for one in terms if one is not None and one.op_type == "Mul")
            experts = next((name for name in major.input if name in self.counts), "")
            if experts:
                self.orders[node.output[1]] = experts
        return None

    def _index(self, name: str) -> tuple[str, _Rows | None]:
        """The order, or the rows of numbers, that an index is, without dims of 1."""
        while (node := self.makers.get(name)) is not None and node.op_type == "Unsqueeze":
            name = node.input[0]
        return name, self.rows.get(name)

    def _gather(self, node: NodeProto) -> str | None:
        if integer_of(node, "axis", 0):  # columns of rows
            return self._compute(node)
        data, (index, numbers) = self.rows.get(node.input[0]), self._index(node.input[1])
        experts = self.orders.get(index)
        if data is None and experts is None:
            if numbers is not None:
                self.rows[node.output[0]] = numbers
                return self._counted(node.input[0], index)
            return None
        if data is None:
            return f"it sorts rows that did not come by the Route of '{experts}'"
        if data != _Rows(data.experts) or experts != data.experts:
            return f"it takes {data} by '{index}', which does not sort them by expert"
        self.rows[node.output[0]] = replace(data, order=index)
        return None

    def _counted(self, table: str, experts: str) -> str | None:
        """The fault of a table that has not an entry for each expert of the rank."""
        shape, count = self.types.get(table, ("", None))[1], self.counts.get(experts)
        known = shape[0] if shape else None
        if count is not None and isinstance(known, int) and known != count:
            return f"it has entries for {known} experts, and a rank of the Route of '{experts}' has {count}"
        return None

    def _scatter(self, node: NodeProto) -> str | None:
        index, numbers = self._index(node.input[1])
        updates, experts = self.rows.get(node.input[2]), self.orders.get(index)
        if updates is None and experts is None and numbers is None:
            return None
        if experts is not None and updates == _Rows(experts, index):
            self.rows[node.output[0]] = _Rows(experts)
            return None
        if updates is not None and numbers == updates == _Rows(updates.experts):
            return None  # a table's gradient
        return f"it puts {updates or 'other rows'} at places '{index}', which are not theirs"

    def _split(self, node: NodeProto) -> str | None:
        if integer_of(node, "axis", 0):  # columns of rows
            return self._compute(node)
        state, lengths = self.rows.get(node.input[0]), self.makers.get(node.input[1] if len(node.input) > 1 else "")
        if state is None:
            self.matrices |= {name: k for k, name in enumerate(node.output)}
            return None
        if integer_of(node, "axis", 0) != 0:  # columns
            self.rows |= dict.fromkeys(node.output, state)
            return None
        if not state.order or state.part is not None:
            return f"it splits {state} by expert"
        if len(node.output) != (count := self.counts[state.experts]):
            return f"it splits rows by {len(node.output)} experts, and a rank of the Route of '{state.experts}' has {count}"
        if lengths is not None and lengths.op_type == "ScatterElements" and lengths.input[1] != state.experts:
            return f"it splits rows of '{state.experts}' by the number of rows of each of '{lengths.input[1]}'"
        self.rows |= {name: replace(state, part=k if count > 1 else None) for k, name in enumerate(node.output)}
        return None

    def _multiply(self, node: NodeProto) -> str | None:
        rows = [self.rows[name] for name in node.input if name in self.rows]
        matrices = {self.matrices[name] for name in node.input if name in self.matrices}
        if len({*rows}) > 1:
            return f"it multiplies {rows[0]} with {rows[1]}"
        if rows and rows[0].part is not None and matrices - {rows[0].part}:
            return f"it multiplies {rows[0]} with the matrix of expert {min(matrices - {rows[0].part})}"
        if len(rows) > 1:
            self.gradients[node.output[0]] = rows[0].part or 0
        elif rows:
            self.rows[node.output[0]] = rows[0]
        return None

    def _concat(self, node: NodeProto) -> str | None:
        rows = [self.rows.get(name) for name in node.input]
        gradients = [self.gradients.get(name) for name in node.input]
        if None not in gradients:
            in_order = gradients == [*range(len(gradients))]
            return None if in_order else f"it joins gradients of the experts {gradients} in this order"
        if None in rows:
            return None
        first, parts_of = rows[0], [one.part for one in rows if one is not None]
        if first is None or {*rows} == {first}:
            self.rows |= {} if first is None else {node.output[0]: first}
            return None
        if {replace(one, part=None) for one in rows if one is not None} != {replace(first, part=None)}:
            return f"it joins {first} with {next(one for one in rows if one != first)}"
        if parts_of != [*range(self.counts[first.experts])]:
            return f"it joins rows of the experts {parts_of} in this order"
        self.rows[node.output[0]] = replace(first, part=None)
        return None

    def _compute(self, node: NodeProto) -> str | None:
        """Follows rows and matrices through any other node; what is made of their sizes alone is neither."""
        if node.op_type in ("Shape", "Size", "ConstantOfShape", "Range", "NonZero", "ScatterElements"):
            return None
        states = [*dict.fromkeys(self.rows[name] for name in node.input if name in self.rows)]
        if len(states) > 1:
            return f"it combines {states[0]} with {states[1]}"
        for name in node.output:
            shape = self.types.get(name, ("", None))[1]
            dims = self._symbols_of(name)
            if states and (shape is None or dims - self.symbols):
                self.rows[name] = states[0]
            elif states and dims:
                return f"it makes '{name}' of the shape {shape} of {states[0]}, whose number only a run tells"
        for known in (self.matrices, self.gradients) if node.input else ():
            known |= {node.output[0]: known[node.input[0]]} if node.input[0] in known else {}
        return None
