"""Pass: parameters on serving ranks: `placement: {"embedding": {role: ps}}`, by a module, a node or the parameter's own
name, in a model `place(self.embedding, role="ps")`.

Of a table, a parameter whose rows are looked up and nothing else, each server has a run of rows: the lookup runs on the workers,
which pull the rows that their ids name and push gradients of rows (`lower/pulls.py`). Any other parameter is read by one node on its
servers, an Identity, whose output its readers take:

    y = MatMul(x, fc.weight)    ->    fc.weight.pulled = Identity(fc.weight)     on the servers, once a step
                                      y = MatMul(x, fc.weight.pulled)            on the workers

So it lies on the servers alone and is updated there. Its value moves as any value does, in whatever layouts the workers have; its gradient
as that of any parameter: workers add it up over microbatches and send it once a step. Of several servers each has a run of the first
dim, where it divides; else the one with the least bytes has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import PINNED, SERVED, name_of
from partc.compiler.ir.program import Typed
from partc.compiler.matching import is_unneeded, matched_nodes, modules_of, placed_on_roles
from partc.compiler.ops.registry import looks_up_rows
from partc.compiler.plan.pattern import compile_pattern, wider
from partc.compiler.plan.rules import PlacementRule, ShardingRule
from partc.compiler.rewrite.rewriting import Rewriting
from partc.runtime.spellings import nearest

_LISTED = "`partc plan MODEL` lists modules with their parameters"


def serve(program: Typed) -> Typed:
    """Gives parameters to the ranks that serve them; the program itself where none are. CompileError for patterns that match nothing."""
    served = _served(program)
    if not served:
        return program
    rewriting = _Serving(program)
    for value, rule in served.items():
        rewriting.serve(value, rule)
    plan = replace(
        program.plan,
        placement=(*program.plan.placement, *rewriting.placement),
        sharding=(*rewriting.sharding, *program.plan.sharding),
    )
    return rewriting.done(plan=plan)


def _served(program: Typed) -> dict[ir.Value, PlacementRule]:
    """Maps each parameter, in the model's order, to the rule that gives it to servers: the last rule that matches it or its readers."""
    rules = [*placed_on_roles(program), *program.plan.placement]
    if not any(rule.serves for rule in rules):
        return {}
    from partc.compiler.training.trainable import trainable_names

    graph, training = program.model.graph, program.training
    names = [] if training is not None else trainable_names(program.model)
    owned = {*training.parameters} if training is not None else {graph.initializers[name] for name in names}
    order = [value for value in graph.initializers.values() if value in owned and value.uses()]
    decided: dict[ir.Node, int] = {}
    named: dict[ir.Value, int] = {}
    problems = []
    for k, rule in enumerate(rules):
        hit = matched_nodes(program, rule.pattern)
        decided.update(dict.fromkeys(hit, k))
        if not rule.serves:
            continue
        matches = compile_pattern(rule.pattern).matches
        by_name = [value for value in order if matches(name_of(value))]
        named.update(dict.fromkeys(by_name, k))
        if not by_name and not any(value in owned for node in hit for value in node.inputs):
            if not hit and is_unneeded(program, rule.pattern):
                continue
            readers = [path for node, path in program.paths.items() if any(value in owned for value in node.inputs)]
            paths = [*modules_of(readers), *readers, *(name_of(value) for value in order)]
            fact = f"'{rule.pattern}' matches no parameter, and no module or node that has parameters"
            close = ", ".join(f"'{name}'" for name in nearest(rule.pattern, paths))
            help = wider(rule.pattern, paths) or (f"the nearest are {close}" if close else _LISTED)
            problems.append(Problem(rule.where, fact, help=help))
    if problems:
        raise CompileError(problems)
    served = {}
    for value in order:
        reading = [decided[use.node] for use in value.uses() if use.node in decided]
        deciding = max([*reading[:1], *([named[value]] if value in named else [])], default=None)
        if deciding is not None and rules[deciding].serves:
            served[value] = rules[deciding]
    return served


@dataclass(frozen=True)
class _OwnerGroup:
    ranks: tuple[int, ...]
    shards: int


class _Serving(Rewriting[Typed]):
    def __init__(self, program: Typed) -> None:
        super().__init__(program)
        self.placement: list[PlacementRule] = []
        self.sharding: list[ShardingRule] = []
        self.bytes: dict[int, int] = {}

    def serve(self, value: ir.Value, rule: PlacementRule) -> None:
        """Gives a parameter to the servers of a rule."""
        readers = list(dict.fromkeys(use.node for use in value.uses()))
        lookups = all(looks_up_rows(node) and value not in node.inputs[1:] for node in readers)
        if lookups and all(node in self.paths for node in readers):
            self._look_up(value, readers, rule)
            return
        home = self._home(value, rule.ranks)
        name = self.free(f"{value.name}.pulled")
        pulled = self.like(value, name)
        value.replace_all_uses_with(pulled)
        node = ir.Node("", "Identity", [value], outputs=[pulled], name=name)
        node.meta[PINNED] = True
        self.paths[node] = name
        first = next(iter(self.graph))
        self.graph.insert_before(first, node)
        self._put_on(node, home, rule, value)

    def _look_up(self, value: ir.Value, readers: Sequence[ir.Node], rule: PlacementRule) -> None:
        """Has the readers of a table ask the servers for its rows."""
        sizes = value.shape.numpy() if value.shape is not None and value.shape.is_static() else ()
        if sizes and sizes[0] % len(rule.ranks):
            fact = f"'{value.name}' has {sizes[0]} rows, which {len(rule.ranks)} servers cannot share equally"
            raise CompileError(Problem(rule.where, fact, help="take fewer servers, or give the table more rows"))
        for node in readers:
            node.meta[SERVED] = rule.ranks

    def _home(self, value: ir.Value, servers: Sequence[int]) -> _OwnerGroup:
        """The servers of a parameter that is read whole, and into how many runs of its first dim it is cut."""
        shape = value.shape.numpy() if value.shape is not None and value.shape.is_static() else ()
        size = value.const_value.nbytes if value.const_value is not None else 0
        cut = len(servers) > 1 and bool(shape) and shape[0] >= len(servers) and shape[0] % len(servers) == 0
        ranks = tuple(servers) if cut else (min(servers, key=lambda rank: (self.bytes.get(rank, 0), rank)),)
        for rank in ranks:
            self.bytes[rank] = self.bytes.get(rank, 0) + size // len(ranks)
        return _OwnerGroup(ranks, len(ranks))

    def _put_on(self, node: ir.Node, home: _OwnerGroup, rule: PlacementRule, value: ir.Value) -> None:
        pattern = self.paths[node]
        self.placement.append(PlacementRule(pattern, home.ranks, rule.where))
        if home.shards > 1:
            rank = len(value.shape) if value.shape is not None else 1
            cut = (home.shards, *[1] * (rank - 1))
            inputs = (cut, *[None] * (len(node.inputs) - 1))
            self.sharding.append(ShardingRule(pattern, None, inputs, None, {}, rule.where))
