"""Pass: shards every node on its group, which decides the layout of every value; all shapes are global.

Given shardings are seeded (`seeding/`), the others derived (`propagate.py`), and then every sharding is checked by the law: a dim is
divided only into shards that are proven to be equal, for all sizes that its symbols may have.

An op that reads a weight only for its size reads the shard of the weight's other reader: each rank knows the number of shards.

h = MatMul(x, w), w in two shards        s = Shape(w)     would keep the unsharded weight next to its shard, and train it twice

Values that are cheap to compute from inputs and shapes are computed in a layout from which every reader takes a slice.

A mask that one reader needs sharded and another replicated would be gathered, or exchanged, in every step. Since its operands are on every
rank, every rank computes all of it instead: a derived sharding is removed if a reader on the same ranks needs the value in another layout.
The sharding stays if that would gather an input that arrives sharded and has more bytes than the value, or if the value is computed from a
large weight: a projection is not a table.

The module also handles shardings given for a region's inputs that no op inside takes. If one op inside takes it, the value enters in the
rule's sharding. If none does, because another value of the region was given a sharding that the op follows, the value is resharded at the
op; the same, with a warning, if the op needs the dim unsharded. If an op could take the sharding but for a law, such as a size that is not
proven to be divisible, that is an error.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath

import onnx_ir as ir
from partc.compiler.analysis.lost import dim_of, how_lost
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.reading import names_in, read
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned
from partc.compiler.ir.graph import BY_EXPERT, CONTEXT, SERVED
from partc.compiler.ir.program import Placed, Sharded
from partc.compiler.ir.sized import SIZES
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal, on_common_mesh
from partc.compiler.matching import sharding_rules, stored_units
from partc.compiler.ops.families.neural.ring import RING
from partc.compiler.ops.families.neural.sharded_cache_attention import (
    ENTRIES,
    SHARDED_ATTENTION,
    is_sharded_attention,
)
from partc.compiler.ops.families.shapes.joined import JOIN, SPLIT, TOKENS
from partc.compiler.ops.node import dims
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import OWN, WHOLE, Rule
from partc.compiler.placement.computed_at_readers import following, is_large_weight, repeatable
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.compiler.plan.generate import multiples_beside
from partc.compiler.plan.groups import ranks_text
from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.plan.rules import ShardingRule
from partc.compiler.sharding.avoidable_gathers import gathered_dims, gathers_of_uneven_sizes, gathers_of_unknown_sizes
from partc.compiler.sharding.bodies import carry_layouts, wrong_bodies
from partc.compiler.sharding.levels import prefer
from partc.compiler.sharding.propagate import Propagation
from partc.compiler.sharding.seeding.local_maps import seed_local_maps
from partc.compiler.sharding.seeding.region_layouts import is_text
from partc.compiler.sharding.seeding.regions import group_mesh
from partc.compiler.sharding.seeding.seeds import seed
from partc.compiler.sharding.seeding.strategy import refined
from partc.runtime.artifact import format as fmt


def ask_shards(done: Propagation) -> None:
    """Gives each node that reads a weight only for its size the sharding of the weight's first reader that shards it."""
    choices = done.choices
    for instance, choice in choices.items():
        node = instance.node
        if node.op_type not in SIZES or node.domain not in ("", "ai.onnx") or choice.axes or not choice.open:
            continue
        (value,) = node.inputs
        letters = choice.rule.inputs[0]
        if value is None or letters is None or not value.is_initializer():
            continue
        for use in value.uses():
            other = choices.get(NodeOnGroup(use.node, instance.group))
            layout = other.input(use.idx) if other is not None and other.mesh == choice.mesh else None
            if layout is not None and any(layout.cuts) and not layout.partial:
                cuts = {letter: axes for letter, axes in zip(letters, layout.cuts, strict=True) if axes}
                choice.axes |= cuts
                choice.why |= dict.fromkeys(cuts, done.paths[use.node])
                break


def shard_heads(program: Placed, choices: Mapping[NodeOnGroup, NodeSharding]) -> None:
    """Shards the heads of an attention over the axis of the plan's `context`, minor to the axes that already shard them."""
    for instance, choice in choices.items():
        mark = instance.node.meta.get(CONTEXT)
        if mark is None or not mark.factor or mark.first:
            continue
        mesh, named = refined(program.plan.axes_of(instance.group))
        if choice.mesh == mesh and choice.free.issuperset(named.get(mark.axis, ())):
            choice.axes[mark.factor] = (*choice.axes.get(mark.factor, ()), *named.get(mark.axis, ()))
            choice.why[mark.factor] = mark.why
            choice.open = False
    for instance, choice in choices.items():  # a size is known wherever a shard is
        value = instance.node.inputs[0] if instance.node.op_type in SIZES else None
        maker = value.producer() if value is not None else None
        made = choices.get(NodeOnGroup(maker, instance.group)) if maker is not None and CONTEXT in maker.meta else None
        layout = made.output(0) if made is not None and choice.open else None
        if layout is not None:
            choice.mesh = layout.mesh
            choice.axes |= {
                letter: axes for letter, axes in zip(choice.rule.inputs[0] or "", layout.cuts, strict=True) if axes
            }


def shard(program: Placed) -> Sharded:
    """Fills `choices` and `pinned`.

    Raises CompileError with all violations: strategies that an op cannot have, and dims that are not proven to be divisible.
    """
    rules, _ = sharding_rules(program)
    if alone := [*experts_alone(program), *wrong_bodies(program)]:
        raise CompileError(alone)
    together = any(len(group) > 1 for placed in program.placement.values() for group in placed.groups)
    if program.plan.ranks == 1 or not (together or rules):
        if wrong := [*seed_local_maps(program, {}), *parted_tokens(program, {})]:
            raise CompileError(wrong)
        return program.into(Sharded, choices={}, pinned=Pinned())
    instances = [
        NodeOnGroup(node, group)
        for node in program.model.graph
        for group in program.placement[node].groups
        if len(group) > 1
    ]
    meshes = {group: group_mesh(program, group) for group in dict.fromkeys(instance.group for instance in instances)}
    strings = {value for value, info in program.values.items() if "string" in info.type and is_text(value)}
    choices = {instance: NodeSharding(_rule(instance.node, strings), meshes[instance.group]) for instance in instances}
    laws = _Laws(program)
    pinned, problems = seed(program, choices, rules)
    pinned.units, unmatched = stored_units(program)
    problems += unmatched
    problems += seed_local_maps(program, choices)
    if not problems:
        derived = Propagation(instances, choices, pinned, program.paths, laws.weigh, laws.divides_in(choices))
        derived.run()
        shard_heads(program, choices)
        levels = prefer(rules, derived)
        replicate_cheap_values(program, derived)
        ask_shards(derived)
        carry_layouts(choices)
        unmet, warnings = not_taken(program, choices, pinned, laws.refusal)
        problems = [*unmet, *laws.violations(choices, pinned), *parted_experts(program, choices)]
        problems += parted_tokens(program, choices)
        warnings += gathered_inside(program, choices, rules)
        gathered = list(gathered_dims(choices, derived))
        warnings += gathers_of_unknown_sizes(program, gathered)
        wheres = [rule.where for rule in (*program.declared.sharding, *program.plan.sharding)]
        wheres += [where for _, where in (*pinned.arriving.values(), *pinned.stored.values(), *pinned.outputs.values())]
        lines = {PurePath(where).name: where for where in wheres}
        uneven = gathers_of_uneven_sizes(program, choices, gathered, laws.uneven)
        found = [*problems, *(uneven if program.strict else ())]
        problems, uneven = (
            [replace(problem, where=lines.get(problem.where, problem.where)) for problem in some]
            for some in (found, uneven)
        )
        warnings += [] if program.strict else map(str, uneven)
        program = replace(program, warnings=(*program.warnings, *warnings, *levels))
    if problems:
        raise CompileError(problems)
    return program.into(Sharded, choices=choices, pinned=pinned)


def _rule(node: ir.Node, strings: Container[ir.Value | None]) -> Rule:
    """The rule of a node, with the dims of string tensors replicated: no collective takes strings."""
    rule = rule_of(node)
    if SERVED in node.meta:  # its rows lie on other ranks, which are asked for them
        rule = replace(rule, replicated=rule.replicated | {*(rule.inputs[0] or "")}, looked_up="", served=True)
    if BY_EXPERT in node.meta and not rule.dealt:  # rows are with the ranks of their experts
        table = next((letters[0] for letters in rule.inputs if letters and letters[0] in rule.reduce), "")
        rule = replace(rule, looked_up=table)
    if (mark := node.meta.get(CONTEXT)) is not None:
        rule = replace(rule, replicated=rule.replicated | {*mark.replicated})
    if strings:
        operands = [*zip(rule.inputs, node.inputs, strict=False), *zip(rule.outputs, node.outputs, strict=False)]
        text = {letter for letters, value in operands if letters and value in strings for letter in letters}
        rule = replace(rule, replicated=rule.replicated | text) if text else rule
    return rule


def experts_alone(program: Placed) -> Iterator[Problem]:
    """Yields a problem for the first node of sharded experts that runs on a single rank."""
    sizes = dict(program.plan.mesh)
    for node in program.model.graph:
        axis, where = node.meta.get(BY_EXPERT, ("", ""))
        placed = program.placement[node]
        if sizes.get(axis, 1) > 1 and any(len(group) == 1 for group in placed.groups):
            fact = f"'{program.paths[node]}' runs on rank {placed.groups[0][0]} alone ({placed.rule})"
            law = f"its experts are shared out to the {sizes[axis]} ranks along '{axis}'"
            yield Problem(where, fact, law, "place it on a list of ranks, or take the line out")
            return


def parted_experts(program: Placed, choices: Mapping[NodeOnGroup, NodeSharding]) -> Iterator[Problem]:
    """Yields a problem for sharded experts that would not get all of their rows exactly once: the first fault of each line of the plan."""
    reported = set[str]()
    for instance, choice in choices.items():
        if BY_EXPERT not in (node := instance.node).meta:
            continue
        axis, where = node.meta[BY_EXPERT]
        path, rows = program.paths[node], {at for letter in choice.rule.ids for at in choice.axes.get(letter, ())}
        owners = choice.axes.get(choice.rule.looked_up, ())
        fact = law = help = ""
        if choice.rule.dealt and rows & {*owners} and not rows >= {*owners}:
            shards, cut = choice.num_shards(choice.rule.looked_up), choice.num_shards(choice.rule.ids[0])
            fact = f"the tokens of '{path.rpartition('.')[0]}' are cut into {cut} along '{axis}', and its experts into {shards}"
            law = "ranks with the same tokens would all send them to the experts"
            help = f"shard the tokens along all of '{axis}', or not along it"
        for k, value in enumerate(node.inputs):
            if value is None or BY_EXPERT not in value.meta or (maker := value.producer()) is None:
                continue
            there = choices.get(NodeOnGroup(maker, instance.group))
            made, read = None if there is None else there.output(value.index() or 0), choice.input(k)
            if made is None or read is None or (made.mesh, made.cuts[0]) != (read.mesh, read.cuts[0]):
                fact = f"'{path}' takes rows of experts otherwise than '{program.paths[maker]}' gives them"
                law = "between the products of experts each row is with the rank of its expert"
                help = "give the nodes between no sharding and no ranks of their own"
        if fact and where not in reported:
            reported.add(where)
            yield Problem(where, fact, law, help)


def parted_tokens(program: Placed, choices: Mapping[NodeOnGroup, NodeSharding]) -> Iterator[Problem]:
    """Yields a problem for the first node whose tokens are in the order of the ranks of the plan's `context`, but not on all of them; or
    whose caches are.
    """
    context, factors = program.plan.context, {RING: "s", JOIN: TOKENS, SPLIT: TOKENS, SHARDED_ATTENTION: ENTRIES}
    for node in program.model.graph if context is not None else ():
        over = node.attributes.get_int("tokens", 0) if node.domain == OWN and node.op_type in factors else 0
        what = "tokens"
        if is_sharded_attention(node) and (ends := dims(node.inputs[5])) is not None and isinstance(ends[0], int):
            over, what = ends[0], "caches"
        for group in program.placement[node].groups if over else ():
            choice = choices.get(NodeOnGroup(node, group))
            have = 1 if choice is None else choice.num_shards(factors[node.op_type])
            if have != over and context is not None:
                fact = f"'{program.paths[node]}' has its {what} on {have} of the {over} ranks along '{context.axis}'"
                law = f"it runs on {ranks_text(group)} ({program.placement[node].rule}), and needs one shard of the {what} on each"
                other = "leave out 'context'" if what == "caches" else "cut tokens by 'context' alone"
                help_ = f"place it on ranks that have all of '{context.axis}', or {other}"
                yield Problem(context.where(), fact, law, help_)
                return


class _Laws:
    """Divisibility of dims and weights of values, from the facts about symbols."""

    def __init__(self, program: Placed) -> None:
        self.program = program
        self.known = {name: info.facts for name, info in program.symbols.items()}
        self.memo: dict[str, Facts] = {}
        self.sizes = TypicalSizes(program)
        self.weights: dict[ir.Value, tuple[int, int]] = {}

    def facts(self, dim: str) -> Facts:
        if dim not in self.memo:
            self.memo[dim] = facts_of(dim, self.known)
        return self.memo[dim]

    def is_divisible(self, size: int | str | None, shards: int) -> bool:
        """Whether a dim is proven to be divisible; a dim of unknown size is not."""
        if isinstance(size, int):
            return size % shards == 0
        return size is not None and self.facts(size).divisible_by(shards)

    def weigh(self, value: ir.Value) -> tuple[int, int]:
        """Returns the number of dims of a value in which one symbol occurs, at least 1, and the value's bytes at typical sizes."""
        if value not in self.weights:
            dims = [read(dim) for dim in self.program.values[value].shape or () if isinstance(dim, str)]
            counts = Counter(name for dim in dims if dim is not None for name in names_in(dim))
            self.weights[value] = max(counts.values(), default=1), self.sizes.bytes_of(value)
        return self.weights[value]

    def dims(
        self, instance: NodeOnGroup, choice: NodeSharding, letter: str
    ) -> Iterator[tuple[ir.Value, int, int | str | None]]:
        """Yields the dims that a factor names, with their values and sizes; None for an unknown size."""
        operands = [
            *zip(choice.rule.inputs, instance.node.inputs, strict=False),
            *zip(choice.rule.outputs, instance.node.outputs, strict=False),
        ]
        for letters, value in operands:
            if letters is None or value is None:
                continue
            for dim, each in enumerate(letters):
                if each == letter and not (dim == 0 and BY_EXPERT in value.meta):
                    yield value, dim, dim_of(self.program, value, dim)

    def divides_in(self, choices: dict[NodeOnGroup, NodeSharding]) -> Callable[[NodeOnGroup, str, int], bool]:
        def divides(instance: NodeOnGroup, letter: str, shards: int) -> bool:
            choice = choices[instance]
            if choice.rule.units.get(letter, 0) % shards:
                return False
            return all(self.is_divisible(size, shards) for _, _, size in self.dims(instance, choice, letter))

        return divides

    def refusal(
        self, instance: NodeOnGroup, choice: NodeSharding, letter: str, shards: int, where: str
    ) -> Problem | None:
        """Returns the reason for which a node's factor cannot be divided into `shards` shards; None if it can."""
        if (unit := choice.rule.units.get(letter, 0)) % shards:
            return Problem(where, f"{self._subject(instance)}: {unit} heads or groups cannot be cut into {shards}")
        for value, dim, size in self.dims(instance, choice, letter):
            if not self.is_divisible(size, shards):
                return self._indivisible(where, self._subject(instance), value, dim, size, shards)
        return None

    def _subject(self, instance: NodeOnGroup) -> str:
        return f"{instance.node.op_type} ({self.program.paths[instance.node]})"

    def uneven(self, instance: NodeOnGroup, choice: NodeSharding, letter: str, shards: int) -> int | None:
        """Returns the size of a node's factor, or of its units, that `shards` does not divide; None if only a symbol is at fault."""
        if (unit := choice.rule.units.get(letter, 0)) % shards:
            return unit
        sizes = [size for _, _, size in self.dims(instance, choice, letter) if isinstance(size, int)]
        return next((size for size in sizes if size % shards), None)

    def violations(self, choices: dict[NodeOnGroup, NodeSharding], pinned: Pinned) -> Iterator[Problem]:
        """Yields a problem for every given sharding that is not proven to give equal shards."""
        for instance, choice in choices.items():
            for letter, shards in choice.cut.items():
                where = choice.why.get(letter, "").split(" ")[0]
                if refusal := self.refusal(instance, choice, letter, shards, where):
                    yield refusal
        weights_and_inputs = (pinned.arriving | pinned.stored).items()
        lying = [(there.value, there.group, layout, where) for there, (layout, where) in weights_and_inputs]
        lying += [(i.node.outputs[k], i.group, layout, where) for (i, k), (layout, where) in pinned.outputs.items()]
        for value, group, layout, where in lying:
            for dim in range(len(layout.cuts)):
                shards = layout.num_shards(dim)
                size = dim_of(self.program, value, dim)
                if shards > 1 and not self.is_divisible(size, shards):
                    yield self._indivisible(where, f"'{value.name}' on {len(group)} ranks", value, dim, size, shards)

    def _indivisible(
        self, where: str, subject: str, value: ir.Value, dim: int, size: int | str | None, shards: int
    ) -> Problem:
        rules = self.program.plan.generate
        if rules is not None and dim == 0 and size == rules.rows and value.is_graph_input():
            slots, count = rules.slots, shards * rules.groups
            turns = f" in {rules.groups} groups that take turns" if rules.groups > 1 else ""
            fact = f"{slots} slots{turns} cannot be dealt out to {shards} groups of ranks"
            help_ = f"write slots: {multiples_beside(slots, count)}"
            return Problem(rules.where("slots"), fact, f"{slots} is not divisible by {count}", help_)
        fact = f"{subject}: cannot cut '{value.name}' dim {dim} ({'unknown' if size is None else size}) into {shards}"
        if size is None:
            return Problem(where, fact, *how_lost(self.program, value, dim))
        if isinstance(size, int):
            fitting = [str(n) for n in range(2, min(size, 64) + 1) if size % n == 0]
            return Problem(
                where,
                fact,
                f"{size} is not divisible by {shards}",
                f"cut it into {', '.join(fitting)}, or leave it whole" if fitting else "leave it whole",
            )
        facts = self.facts(size)
        if size in self.program.symbols:
            info = self.program.symbols[size]
            remedy = f"declare `{size}: {{divisor: {math.lcm(facts.divisor, shards) * info.parts}}}` under symbols, or use fewer shards"
            parts = "microbatches" if self.program.plan.pipeline else "parts that `accumulate` makes of a batch"
            of_part = f" in each of the {info.parts} {parts}" if info.parts > 1 else ""
            law = f"'{size}' is {_spelled(facts)}{of_part} ({info.where}), not always divisible by {shards}"
            return Problem(where, fact, law, remedy)
        return Problem(
            where,
            fact,
            f"{size} is {_spelled(facts)}, not always divisible by {shards}",
            "give its symbols a larger divisor",
        )


def _spelled(facts: Facts) -> str:
    """Returns the sizes that facts allow, for messages: `4*N`, `4*N + 1`, `any size`."""
    if facts.value is not None:
        return str(facts.value)
    steps = "any size" if facts.divisor == 1 else f"{facts.divisor}*N"
    return f"{steps} + {facts.remainder}" if facts.remainder else steps


def replicate_cheap_values(program: Placed, done: Propagation) -> None:
    """Removes derived shardings from nodes that depend on inputs and shapes alone, if a reader needs the value in other shards."""
    shapes = {node: placed.rule for node, placed in program.placement.items() if placed.rule == fmt.SHAPE_ARITHMETIC}
    weighty = {node: "" for node, values in program.reads.items() if any(map(is_large_weight, values))}
    among = {*repeatable(program, weighty, shapes, following(program)), *shapes}
    heavy = _sharded_input_bytes(program, done, among)
    for instance in reversed(done.instances):
        choice = done.choices[instance]
        node = instance.node
        if node not in among or not choice.axes or not choice.open:
            continue
        if any(why not in program.derived_paths for why in choice.why.values()):
            continue
        size = sum(done.weigh(value)[1] for value in node.outputs)
        if heavy.get(node, 0.0) > size:
            continue
        for letter in _disputed(instance, choice, done):
            del choice.axes[letter]
            choice.why.pop(letter, None)


def _disputed(instance: NodeOnGroup, choice: NodeSharding, done: Propagation) -> list[str]:
    """Returns the factors of a node whose shards a reader on the same ranks needs in another layout."""
    disputed: dict[str, None] = {}
    for k, value in enumerate(instance.node.outputs):
        letters, layout = choice.rule.outputs[k], choice.output(k)
        if letters is None or layout is None:
            continue
        for reader, operand in done.readers.get((value, len(instance.group)), ()):
            if reader.group != instance.group:
                continue
            wanted = done.choices[reader].input(operand)
            for dim, letter in enumerate(letters):
                if letter in choice.axes and not _slices(layout, wanted, dim):
                    disputed[letter] = None
    return list(disputed)


def _slices(made: Layout, wanted: Layout | None, dim: int) -> bool:
    """Whether each shard of a dim that a reader needs is inside one that the node computes."""
    if wanted is None:
        return False
    common = on_common_mesh(made, wanted)
    if common is None:
        return False
    have, want = common[0].cuts[dim], common[1].cuts[dim]
    return want[: len(have)] == have


def _sharded_input_bytes(program: Placed, done: Propagation, among: set[ir.Node]) -> dict[ir.Node, float]:
    """Maps each node to the bytes of its sharded inputs, direct and indirect."""
    cut = {
        value: done.weigh(value)[1]
        for value in (there.value for there in done.pinned.arriving)
        if value.is_graph_input()
    }
    below: dict[ir.Value, frozenset[ir.Value]] = {value: frozenset({value}) for value in cut}
    bytes_of: dict[ir.Node, float] = {}
    for node in program.model.graph:
        if node in among:
            inputs = frozenset[ir.Value]().union(*(below.get(value, frozenset()) for value in program.reads[node]))
            if node.op_type in ("Shape", "Size"):
                inputs = frozenset()  # a size is known wherever a shard is: nothing is gathered for it
            bytes_of[node] = sum(cut[value] for value in inputs)
            below.update(dict.fromkeys(node.outputs, inputs))
    return bytes_of


Refusal = Callable[[NodeOnGroup, NodeSharding, str, int, str], Problem | None]
"""Returns the reason why a factor of a node cannot be divided into a number of shards, at the line that requests it; None if it can."""


def not_taken(
    program: Placed, choices: Mapping[NodeOnGroup, NodeSharding], pinned: Pinned, refusal: Refusal
) -> tuple[list[Problem], list[str]]:
    """Returns the problems and warnings of given shardings that no op of their region takes."""
    entering: dict[tuple[object, Layout, str], list[tuple[NodeOnGroup, int]]] = {}
    for (instance, k), (layout, where) in pinned.inputs.items():
        entering.setdefault((instance.node.inputs[k], normal(layout), where), []).append((instance, k))
    problems: list[Problem] = []
    warnings: list[str] = []
    for (_, layout, where), readers in entering.items():
        if any(have is not None and normal(have) == layout for have in (choices[i].input(k) for i, k in readers)):
            continue
        laws = [why for i, k in readers for why in _laws(choices[i], i, k, pinned.inputs[i, k][0], where, refusal)]
        problems += laws
        if not laws:
            warnings += [
                text for i, k in readers[:1] if (text := _needs_replicated(program, choices[i], i, k, layout, where))
            ]
    return problems, warnings


def _laws(
    choice: NodeSharding, instance: NodeOnGroup, k: int, layout: Layout, where: str, refusal: Refusal
) -> list[Problem]:
    """The reasons why a node cannot take an operand in its layout, one for each dim that it could shard."""
    letters = choice.rule.inputs[k] if k < len(choice.rule.inputs) else None
    wanted = [(letter, layout.num_shards(dim)) for dim, letter in enumerate(letters or "") if dim < len(layout.cuts)]
    cuttable = [(letter, shards) for letter, shards in wanted if shards > 1 and letter in choice.rule.factors]
    found = [refusal(instance, choice, letter, shards, where) for letter, shards in cuttable]
    return [problem for problem in found if problem is not None]


def _needs_replicated(
    program: Placed, choice: NodeSharding, instance: NodeOnGroup, k: int, layout: Layout, where: str
) -> str:
    """Returns a warning if a node reads replicated a value that enters sharded; empty if it follows another given sharding."""
    letters = choice.rule.inputs[k] if k < len(choice.rule.inputs) else None
    value, op = instance.node.inputs[k], f"{instance.node.op_type} ({program.paths[instance.node]})"
    cut = [dim for dim in range(len(layout.cuts)) if layout.num_shards(dim) > 1]
    whole = [dim for dim in cut if letters is None or letters[dim] == WHOLE or letters[dim] not in choice.rule.factors]
    if not whole or value is None:
        return ""
    dims = f"dim {whole[0]}" if len(whole) == 1 else f"dims {', '.join(map(str, whole))}"
    return f"{where}: '{value.name}' enters cut {layout}, but {op} needs {dims} replicated: it is gathered there"


def gathered_inside(
    program: Placed, choices: Mapping[NodeOnGroup, NodeSharding], rules: Mapping[ir.Node, ShardingRule]
) -> Iterator[str]:
    """Yields warnings of ops inside a module with a strategy or style that read replicated a value that another op inside shards."""
    is_module = functools.cache(_is_module)
    for instance, choice in choices.items():
        rule = rules.get(instance.node)
        if rule is None or rule.style == "replicate":
            continue
        if not is_module(rule.pattern, program.paths[instance.node].rpartition(".")[0]):
            continue
        for k, value in enumerate(instance.node.inputs):
            producer = value.producer() if value is not None else None
            if value is None or producer is None or rules.get(producer) is not rule:
                continue
            maker = choices.get(NodeOnGroup(producer, instance.group))
            made = maker.output(producer.outputs.index(value)) if maker is not None and maker.axes else None
            text = _needs_replicated(program, choice, instance, k, made, rule.where) if made is not None else ""
            if text:
                yield text.replace(" enters cut ", " is cut ")


def _is_module(pattern: str, path: str) -> bool:
    """Whether a pattern matches the module of this path, or one around it."""
    matches, parts = compile_pattern(pattern).matches, path.split(".") if path else []
    return any(matches(".".join(parts[:end])) for end in range(1, len(parts) + 1))
