"""Pass: inserts borders around the experts that a plan shards; between them, rows are on the rank of their expert.

    h = Act(ExpertMatMul(rows, up, experts));  y = ExpertMatMul(h, down, experts)

    rows', experts', places = ToExperts(rows, experts)
    h = Act(ExpertMatMul(rows', up, experts'));  y' = ExpertMatMul(h, down, experts');  y = FromExperts(y', places, experts)

A region has all nodes between the products of one router's choice, and the nodes after them that compute row by row from these rows alone:
the bias of each expert, which is looked up by the same choice, and its Add. Any other op in between that combines rows, or reads other
rows, is refused by name, since it would need all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import BY_EXPERT, name_of
from partc.compiler.ir.program import Annotated
from partc.compiler.matching import matched_nodes, nothing_matched
from partc.compiler.ops.families.neural.expert_rows import FROM_EXPERTS, TO_EXPERTS
from partc.compiler.ops.families.neural.experts import EXPERT_MATMUL, EXPERT_MATMUL_N_BITS
from partc.compiler.ops.node import same
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import OWN, WHOLE
from partc.compiler.plan.experts import ExpertsRule
from partc.compiler.rewrite.rewriting import Rewriting


def route_experts(program: Annotated) -> Annotated:
    """Inserts the borders of the plan's `experts`; raises CompileError if a rule matches no experts, or they cannot be sharded."""
    chosen, problems = _chosen(program)
    work = Rewriting(program)
    for experts, (products, rule) in chosen.items():
        region = _Region(work, experts, rule, products)
        problems += region.problems()
        if not problems:
            region.cut()
    if problems:
        raise CompileError(problems)
    return work.done() if chosen else program


def _chosen(program: Annotated) -> tuple[dict[ir.Value, tuple[list[ir.Node], ExpertsRule]], list[Problem]]:
    """Maps each choice of experts to its products and the last rule that matches one; a problem per rule that matches none."""
    by_choice: dict[ir.Value, tuple[list[ir.Node], ExpertsRule]] = {}
    problems: list[Problem] = []
    for rule in program.plan.experts:
        nodes = matched_nodes(program, rule.pattern)
        products = [node for node in nodes if _is_product(node)]
        for experts in dict.fromkeys(node.inputs[2] for node in products):
            assert experts is not None
            alike = dict.fromkeys(use.node for use in experts.uses() if _is_product(use.node))
            by_choice[experts] = [node for node in program.model.graph if node in alike], rule
        if not nodes:
            problems.append(nothing_matched(program, rule.pattern, rule.where))
        elif not products:
            fact = f"experts of '{rule.pattern}': no node that it matches is a product with the matrices of experts"
            law = "experts are matrices of one weight, of which a router chooses some for each token"
            paths = [program.paths[node] for node in program.model.graph if _is_product(node)]
            known = next((path.rpartition(".")[0] or path for path in paths), "")
            help = f"name a layer of experts, such as '{known}'" if known else "take the line out"
            problems.append(Problem(rule.where, fact, law, help))
    return by_choice, problems


def _is_product(node: ir.Node) -> bool:
    return node.domain == OWN and node.op_type in (EXPERT_MATMUL, EXPERT_MATMUL_N_BITS)


@dataclass
class _Region:
    """The products of one choice of experts, and the nodes between and after them that compute row by row."""

    work: Rewriting[Annotated]
    experts: ir.Value
    rule: ExpertsRule
    products: Sequence[ir.Node]

    def __post_init__(self) -> None:
        self._simplify()
        self.nodes: dict[ir.Node, None] = dict.fromkeys(self.products)
        below, above = self._reach(forward=True), self._reach(forward=False)
        self.nodes |= {node: None for node in self.work.graph if node in below and node in above}
        grown = True
        while grown:
            found = {reader: None for node in self.nodes for out in node.outputs for reader in _readers(out)}
            self.nodes |= (new := {node: None for node in found if node not in self.nodes and self._follows(node)})
            grown = bool(new)
        looked_up = [value.producer() for node in self.nodes for value in node.inputs if value is not None]
        self.nodes |= {node: None for node in looked_up if node is not None and self._is_looked_up(node)}

    def problems(self) -> Iterator[Problem]:
        """Yields the reasons for which the region cannot be sharded."""
        size = dict(self.work.before.plan.mesh).get(self.rule.axis, 1)
        for node in self.products:
            weights = node.inputs[1]
            count = weights.shape[0] if weights is not None and weights.shape is not None else None
            if isinstance(count, int) and count % size:
                path = self.work.paths[node]
                fact = f"the {count} experts of '{path}' cannot be shared out to the {size} ranks of the axis '{self.rule.axis}'"
                law = f"{count} is not divisible by {size}: each rank has as many whole experts"
                fitting = [str(n) for n in range(2, count + 1) if count % n == 0]
                help = (
                    f"give the axis {', '.join(fitting[:-1])} or {fitting[-1]} ranks"
                    if len(fitting) > 1
                    else "take the line out"
                )
                yield Problem(self.rule.where, fact, law, help)
                return
        if len(self.entering) > 1:
            first, other = (value.name for value in self.entering[:2])
            fact = (
                f"the experts of '{self.work.paths[self.products[0]]}' read rows of '{other}' beside those of '{first}'"
            )
            yield Problem(
                self.rule.where, fact, "one row of each token goes to an expert", "take these experts out of the rule"
            )
        for node in self.nodes:
            open_dims = [
                out for out in node.outputs if not all(isinstance(dim, int) for dim in list(out.shape or ())[1:])
            ]
            if open_dims:
                fact = f"a row of '{open_dims[0].name}', between products of experts, has no fixed size"
                yield Problem(self.rule.where, fact, "a message of rows says how many, not how large they are")
            elif not _is_product(node) and not self._is_looked_up(node) and not self._goes_by_rows(node):
                fact = (
                    f"{node.op_type} '{self.work.paths[node]}', between products of experts, needs rows of other ranks"
                )
                law = "between them each row is with the rank of its expert"
                yield Problem(self.rule.where, fact, law, "take these experts out of the rule")

    @property
    def entering(self) -> list[ir.Value]:
        """The values with rows that the region reads and does not compute."""
        inside = {out for node in self.nodes for out in node.outputs}
        read = dict.fromkeys(value for node in self.nodes for value in node.inputs if value is not None)
        return [value for value in read if value not in inside and value is not self.experts and self._has_rows(value)]

    def cut(self) -> None:
        """Inserts the borders."""
        work, graph = self.work, self.work.graph
        first = next(node for node in graph if node in self.nodes and _is_product(node))
        inside = dict.fromkeys(out for node in self.nodes for out in node.outputs)
        (rows,) = self.entering
        count = next(value.shape[0] for node in self.products if (value := node.inputs[1]) is not None and value.shape)
        name = f"{work.paths[first]}.route"
        routed = [
            work.like(value, work.free(f"{name}{word}"))
            for value, word in ((rows, ""), (self.experts, ".experts"), (self.experts, ".places"))
        ]
        for out in routed[1:]:
            out.type = ir.TensorType(ir.DataType.INT64)
            work.values[out] = replace(work.values[out], type="tensor(int64)", item_bytes=8)
        capacity = self.rule.capacity
        dropped = [] if capacity is None else [ir.AttrInt64s("capacity", capacity.as_integer_ratio())]
        self._mark(
            work.put(first, TO_EXPERTS, [rows, self.experts], routed, ".route", dropped, domain=OWN, experts=count)
        )
        self._replace(rows, routed[0])
        _, ids, places = routed
        self._replace(self.experts, ids)
        for out in inside:
            readers = [(use.node, use.idx) for use in out.uses() if use.node not in self.nodes]
            if not readers and not out.is_graph_output():
                continue
            back = work.like(out, work.free(f"{name_of(out)}.return"))
            border = work.put(
                first, FROM_EXPERTS, [out, places, self.experts], [back], f".return.{out.name}", dropped, domain=OWN
            )
            self._mark(border)
            del border.outputs[0].meta[BY_EXPERT]
            for reader, index in readers:
                reader.replace_input_with(index, back)
            for k, output in enumerate(graph.outputs):
                if output is out:
                    graph.outputs[k] = back
                    back.name, out.name = out.name, back.name
        for node in self.nodes:
            self._mark(node)
        graph.sort()

    def _simplify(self) -> None:
        """Replaces GatherND(bias, Unsqueeze(experts)) by Gather(bias, experts), so that biases are looked up by the choice itself."""
        for column in [use.node for use in self.experts.uses() if use.node.op_type in ("Reshape", "Unsqueeze")]:
            shape = column.outputs[0].shape
            if shape is None or len(shape) != 2 or shape[1] != 1:
                continue
            for node in [
                use.node for use in column.outputs[0].uses() if use.node.op_type == "GatherND" and use.idx == 1
            ]:
                if node.attributes.get_int("batch_dims", 0) == 0:
                    made = self.work.like(node.outputs[0], self.work.free(f"{name_of(node.outputs[0])}.rows"))
                    self.work.put(node, "Gather", [node.inputs[0], self.experts], [made], axis=0)
                    self.work.take_place(made, node.outputs[0], node)
                    self.work.drop([node])
            self.work.drop([column])

    def _mark(self, node: ir.Node) -> None:
        """Marks a node and its outputs as computed on the ranks of the experts."""
        node.meta[BY_EXPERT] = self.rule.axis, self.rule.where
        for out in node.outputs:
            out.meta[BY_EXPERT] = self.rule.capacity is not None

    def _replace(self, old: ir.Value, new: ir.Value) -> None:
        for node in self.nodes:
            for k, value in enumerate(node.inputs):
                if value is old:
                    node.replace_input_with(k, new)

    def _reach(self, *, forward: bool) -> set[ir.Node]:
        """The products, and the nodes that depend on one (`forward`) or on which one depends."""
        reached, waiting = {*self.products}, list(self.products)
        while waiting:
            node = waiting.pop()
            values = node.outputs if forward else node.inputs
            for value in values:
                nodes: Iterable[ir.Node | None] = (
                    () if value is None else _readers(value) if forward else [value.producer()]
                )
                for other in nodes:
                    if other is not None and other not in reached:
                        reached.add(other)
                        waiting.append(other)
        return reached

    def _has_rows(self, value: ir.Value) -> bool:
        """Whether the first dim of a value is the rows."""
        if value.shape is None or not len(value.shape) or value.is_initializer() or self.experts.shape is None:
            return False
        return same(value.shape[0], self.experts.shape[0])

    def _is_looked_up(self, node: ir.Node) -> bool:
        """Whether a node looks up rows of a table by the choice, such as a bias of each expert."""
        return node.op_type == "Gather" and node.inputs[1] is self.experts and node.attributes.get_int("axis", 0) == 0

    def _follows(self, node: ir.Node) -> bool:
        """Whether a node computes row by row and reads rows of the region alone."""
        inside = {out for one in self.nodes for out in one.outputs}
        rows = [value for value in node.inputs if value is not None and self._has_rows(value) and value not in inside]
        makers = [value.producer() for value in rows]
        return self._goes_by_rows(node) and all(maker is not None and self._is_looked_up(maker) for maker in makers)

    def _goes_by_rows(self, node: ir.Node) -> bool:
        """Whether each row of a node's outputs depends only on the same row of its inputs."""
        rule = rule_of(node)
        made = {one[0] for one in rule.outputs if one}
        is_one = len(made) == 1 and WHOLE not in made and not made & {*rule.replicated, *rule.units}
        return is_one and all(map(self._has_rows, node.outputs))


def _readers(value: ir.Value) -> list[ir.Node]:
    return [use.node for use in value.uses()]
