"""Pass: checks the model's own annotations of every node against the graph, and reports all violations at once.

A node runs on the devices that its tensors' specs name. Where they name none it runs on those of its pipeline stage: the devices that other
nodes of the stage are on, else the device whose number the stage is; and a cut without devices or stage goes over all devices of the
configuration, in order. Without a plan nothing says what divides a symbol that is cut: the annotation promises it.

One spec of the standard held against the tensor that it speaks of: the spread that it describes, or all that is wrong.

The laws: an axis is one of the tensor's and stands once; a cut makes equal shards of the size that the tensor has; there are as many
devices, or groups of devices, as shards, each device once and all groups of one size; a tensor that is not cut is on every device named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache

import onnx_ir as ir
from partc.compiler.annotations.read import NONE, Annotations, Followed, NodeMarks
from partc.compiler.annotations.spread import Spread, fused_shards
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend import annotation_keys as keys
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Annotated, Typed
from partc.compiler.ir.sharded import Group
from partc.compiler.ir.value_info import Shape, SymbolInfo
from partc.compiler.layout.layout import Mesh
from partc.runtime.spellings import nearest

_EQUAL = "the shards of a tensor are equal"


def spread_in(
    spec: ir.ShardingSpec, rank: int | None, shape: Shape | None, devices: int
) -> tuple[Spread | None, list[tuple[str, str]]]:
    """The spread, and pairs of a fact and its law for what is wrong; `rank` and `shape` None where unknown.

    A tensor of unknown rank has a spread only where no axis is cut.
    """
    holders, device_faults = _devices(tuple(spec.device), tuple(spec.index_to_device_group_map), devices)
    wrong = [*_axis_faults(spec, rank), *device_faults]
    cuts: dict[int, int] = {}
    for sharded in spec.sharded_dims:
        axis = sharded.axis + rank if rank is not None and sharded.axis < 0 else sharded.axis
        if rank is None or not 0 <= axis < rank:
            continue
        size = shape[axis] if shape is not None else None
        wrong += _size_faults(sharded, axis, size)
        count = fused_shards([(_size(one.dim), max(one.num_shards, 1)) for one in sharded.simple_shardings])
        if count is None:
            wrong.append(
                (f"axis {axis} is fused of parts whose shards are not runs of it", "a rank holds one run of a dim")
            )
        cuts[axis] = count or 1
    product = math.prod(cuts.values())
    if not wrong and rank is None and spec.sharded_dims:
        wrong.append(
            ("its number of dims is not known, but it is sharded", "a sharded tensor has a known number of dims")
        )
    if not wrong and holders and product == 1:
        holders = (tuple(sorted(device for ranks in holders for device in ranks)),)
    if not wrong and holders and len(holders) != product:
        shown = " x ".join(f"axis {axis} in {count}" for axis, count in sorted(cuts.items())) or "no axis is sharded"
        fact = f"{product} shards ({shown}), but {len(holders)} devices or groups of devices"
        wrong.append((fact, "there is one for each shard, row-major over the axes"))
    if not wrong and len({len(ranks) for ranks in holders}) > 1:
        sizes = ", ".join(str(len(ranks)) for ranks in holders)
        wrong.append(
            (f"its shards are on groups of unequal sizes: {sizes}", "every shard is on the same number of devices")
        )
    if wrong:
        return None, wrong
    return Spread(tuple(cuts.get(axis, 1) for axis in range(rank or 0)), holders), []


def _axis_faults(spec: ir.ShardingSpec, rank: int | None) -> Iterator[tuple[str, str]]:
    seen: set[int] = set()
    for sharded in spec.sharded_dims:
        axis = sharded.axis
        if rank is not None and not -rank <= axis < rank:
            yield (
                f"axis {axis} is sharded, but it has {rank} dims",
                f"an axis is in -{rank} .. {rank - 1}" if rank else "a scalar has no axis",
            )
            continue
        axis = axis + rank if rank is not None and axis < 0 else axis
        if axis in seen:
            yield f"axis {axis} is sharded twice", "an axis appears once"
        seen.add(axis)
        for one in sharded.simple_shardings:
            if one.num_shards < 1:
                yield f"axis {axis} is sharded into {one.num_shards}", "a dim is sharded into 1 shard or more"


def _size_faults(sharded: ir.ShardedDim, axis: int, size: int | str | None) -> Iterator[tuple[str, str]]:
    """Facts and laws of stated sizes that differ from the tensor's, and of sizes that do not divide evenly."""
    parts = sharded.simple_shardings
    stated = [_size(one.dim) for one in parts]
    known = math.prod(each for each in stated if each is not None)
    if isinstance(size, int) and parts and (known != size if None not in stated else known and size % known):
        yield (
            f"axis {axis} is {'x'.join(str(each) for each in stated)} in the annotation, but {size} in the model",
            "both are the size of one dim",
        )
        return
    for one, part in zip(parts, stated, strict=True):
        whole = part if part is not None else size if len(parts) == 1 else None
        if isinstance(whole, int) and one.num_shards > 1 and whole % one.num_shards:
            yield f"axis {axis} of {whole} is sharded into {one.num_shards} unequal shards", _EQUAL


@lru_cache(maxsize=4096)
def _devices(
    device: Group, entries: tuple[ir.IndexToDeviceGroupMapEntry, ...], devices: int
) -> tuple[tuple[Group, ...], tuple[tuple[str, str], ...]]:
    """Maps each shard to the devices that hold it; with facts and laws of what is wrong."""
    groups = {entry.key: tuple(entry.value) for entry in entries}
    holders = tuple(groups.get(each, (each,)) for each in device)
    wrong = []
    if len(groups) < len(entries):
        wrong.append(("index_to_device_group_map has a key twice", "a key names one group"))
    for each, members in zip(device, holders, strict=True):
        if not members:
            wrong.append((f"the group {each} is empty", "a shard is on at least one device"))
        within = f" of group {each}" if each in groups else ""
        for member in members:
            if not 0 <= member < devices:
                law = f"devices are 0 .. {devices - 1}, other numbers are keys of index_to_device_group_map"
                wrong.append((f"device {member}{within} is not there, the configuration has {devices}", law))
    counts = Counter(member for members in holders for member in members)
    if twice := sorted(member for member, count in counts.items() if count > 1):
        wrong.append((f"device {twice[0]} holds two shards", "a device holds one shard of a tensor"))
    return holders, tuple(wrong)


def _size(dim: int | ir.SymbolicDim) -> int | None:
    return dim if isinstance(dim, int) else None


_FREE = Facts()
_TOOLS = (
    "annotate last: tools that extract, rename or convert drop configurations and leave names behind; "
    f"`--configuration {NONE}` compiles without annotations"
)


def follow_annotations(program: Typed) -> Annotated:
    """Fills `followed`. Raises CompileError with every violation: names that nothing has, axes, devices, unequal shards."""
    annotations = program.declared.annotations
    if annotations is None:
        return program.into(Annotated, followed={})
    work = _Check(program, annotations)
    followed = work.followed()
    problems = [*work.dangling(), *work.problems, *work.too_few_ranks(followed)]
    if problems:
        raise CompileError(problems)
    symbols = {**program.symbols, **_promised(program, followed)} if not program.plan.file else program.symbols
    warnings = (*program.warnings, *annotations.warnings, *work.gone())
    return program.into(Annotated, followed=followed, symbols=symbols, warnings=warnings)


def _promised(program: Typed, followed: Mapping[ir.Node, Followed]) -> dict[str, SymbolInfo]:
    """Symbols that only the annotations constrain: sharding such a dim promises that it is divisible."""
    divisors: dict[str, int] = {}
    for node, one in followed.items():
        for values, spreads in ((node.inputs, one.inputs), (node.outputs, one.outputs)):
            for k, spread in spreads.items():
                value = values[k]
                shape = program.values[value].shape if value is not None and spread.count > 1 else None
                for dim, shards in zip(shape or (), spread.shards, strict=False):
                    if isinstance(dim, str) and dim in program.symbols and program.symbols[dim].facts == _FREE:
                        divisors[dim] = math.lcm(divisors.get(dim, 1), shards)
    return {
        name: SymbolInfo(Symbol(divisor=divisor).facts(), f"{program.name}, annotations")
        for name, divisor in divisors.items()
        if divisor > 1
    }


class _Check:
    def __init__(self, program: Typed, annotations: Annotations) -> None:
        self.program, self.annotations = program, annotations
        self.problems: list[Problem] = []
        self.present = {node: marks for node, marks in annotations.nodes.items() if node in program.paths}

    def where(self, node: ir.Node) -> str:
        return f"{self.program.name}:{self.program.paths.get(node, node.name)}"

    def dangling(self) -> Iterator[Problem]:
        """Problems of nodes whose configuration the model does not declare."""
        names = [one.name for one in self.program.model.device_configurations]
        for called, nodes in self.annotations.dangling.items():
            first = ", ".join(f"'{self.program.paths.get(node, node.name)}'" for node in nodes[:3])
            count = (
                f"{len(nodes)} nodes ({first}{', ...' if len(nodes) > 3 else ''}) are"
                if len(nodes) > 1
                else f"{first} is"
            )
            fact = f"{count} annotated for the configuration '{called}', which the model does not declare"
            have = f"it declares {', '.join(map(repr, names))}" if names else "it declares none"
            yield Problem(self.program.name, fact, have, _TOOLS)

    def gone(self) -> list[str]:
        """A warning about annotated nodes that a rewrite removed before the check."""
        lost = [node.name or node.op_type for node in self.annotations.nodes if node not in self.present]
        named = ", ".join(f"'{name}'" for name in lost[:3])
        return (
            [f"the annotations of {named} ({len(lost)} in all) are not followed: the op is expressed by others"]
            if lost
            else []
        )

    def followed(self) -> dict[ir.Node, Followed]:
        spreads = {node: self._spreads(node, marks) for node, marks in self.present.items()}
        stages: dict[int, set[Group]] = {}
        for node, (inputs, outputs) in spreads.items():
            stage = self.present[node].stage
            for spread in (*inputs.values(), *outputs.values()):
                if stage is not None and spread.holders:
                    stages.setdefault(stage, set()).add(spread.ranks)
        known = {}
        for node, marks in self.present.items():
            try:
                one = self._one(node, marks, *spreads[node], stages)
            except (keys.BrokenKey, TypeError, ValueError) as error:
                self.problems.append(Problem(self.where(node), str(error), help="remove the metadata of the node"))
                continue
            if one is not None:
                known[node] = one
        return known

    def _spreads(self, node: ir.Node, marks: NodeMarks) -> tuple[dict[int, Spread], dict[int, Spread]]:
        inputs: dict[int, Spread] = {}
        outputs: dict[int, Spread] = {}
        where = self.where(node)
        if marks.entries > 1:
            fact = f"{marks.entries} entries for the configuration '{self.annotations.configuration.name}'"
            self.problems.append(Problem(where, fact, "a node has one entry for a configuration"))
        seen: set[ir.Value] = set()
        for mark in marks.marks:
            value = mark.spec.value
            operands = [name_of(one) for one in (*node.inputs, *node.outputs) if one is not None and one.name]
            if value is None or not value.name:
                self.problems.append(
                    Problem(where, "a spec names no tensor", "it names an input or output of the node")
                )
                continue
            if not mark.inputs and not mark.outputs:
                near = nearest(value.name, operands, 1)
                remedy = f"the nearest is '{near[0]}'; {_TOOLS}" if near else _TOOLS
                fact = f"the annotation's tensor '{value.name}' is not an input or output of the node"
                self.problems.append(Problem(where, fact, f"these are {', '.join(map(repr, operands))}", remedy))
                continue
            if value in seen:
                self.problems.append(
                    Problem(where, f"two specs for '{value.name}'", "a tensor has one spec for a configuration")
                )
                continue
            seen.add(value)
            info = self.program.values.get(value)
            shape = info.shape if info is not None else None
            rank = len(shape) if shape is not None else len(value.shape) if value.shape is not None else None
            spread, wrong = spread_in(mark.spec, rank, shape, self.annotations.configuration.num_devices)
            self.problems += [Problem(where, f"'{value.name}': {fact}", law) for fact, law in wrong]
            if spread is not None:
                inputs.update(dict.fromkeys(mark.inputs, spread))
                outputs.update(dict.fromkeys(mark.outputs, spread))
        return inputs, outputs

    def _one(
        self,
        node: ir.Node,
        marks: NodeMarks,
        inputs: dict[int, Spread],
        outputs: dict[int, Spread],
        stages: Mapping[int, set[Group]],
    ) -> Followed | None:
        group = self._group(node, marks.stage, [*inputs.values(), *outputs.values()], stages)
        metadata = node.metadata_props
        follows = keys.decode(metadata, keys.FOLLOWS) is True
        cuts: dict[Group, tuple[Mesh, dict[str, tuple[int, ...]]]] = {}
        for one in keys.records(keys.decode(metadata, keys.CUTS), keys.CUTS):
            if "ranks" in one:
                ranks, mesh = (keys.integers(one.get(key), keys.CUTS) for key in ("ranks", "mesh"))
                axes = keys.mapping(one.get("axes"), keys.CUTS)
                cuts[ranks] = mesh, {letter: keys.integers(each, keys.CUTS) for letter, each in axes.items()}
        reduced = keys.decode(metadata, keys.REDUCED)
        if group is None and not cuts and not follows:
            return None
        ordered = group or ()
        if (said := keys.decode(metadata, keys.GROUP)) is not None:
            order = keys.integers(said, keys.GROUP)
            ordered = order if sorted(order) == sorted(ordered) else ordered
        return Followed(
            group=ordered,
            inputs={k: spread.over(ordered) for k, spread in inputs.items()},
            outputs={k: spread.over(ordered) for k, spread in outputs.items()},
            where=self.where(node),
            follows=follows,
            cuts=cuts,
            reduced=frozenset(reduced) if isinstance(reduced, list) else frozenset(),
        )

    def _group(
        self, node: ir.Node, stage: int | None, spreads: list[Spread], stages: Mapping[int, set[Group]]
    ) -> Group | None:
        """The node's ranks; None if its annotation names none, or wrong ones, which is a problem."""
        count = self.annotations.configuration.num_devices
        named = dict.fromkeys(spread.ranks for spread in spreads if spread.holders)
        if len(named) > 1:
            listed = "; ".join(", ".join(map(str, ranks)) for ranks in named)
            fact = f"its tensors are on different devices: {listed}"
            law = "a node runs on one group of ranks, and all its tensors are spread over it"
            help = "give its tensors the node's own devices: what another node makes or reads elsewhere is moved"
            self.problems.append(Problem(self.where(node), fact, law, help))
            return None
        group = next(iter(named), None)
        if group is None and stage is not None:
            others = stages.get(stage, set())
            if len(others) == 1:
                group = next(iter(others))
            elif 0 <= stage < count:
                group = (stage,)
            else:
                fact = f"pipeline stage {stage}, but the configuration has {count} devices"
                law = "a stage whose nodes name no devices is the device of its number"
                self.problems.append(Problem(self.where(node), fact, law, "name the devices in a spec"))
                return None
        if group is None and any(spread.count > 1 for spread in spreads):
            group = tuple(range(count))
        for shards in dict.fromkeys(spread.count for spread in spreads if not spread.holders):
            if group is not None and len(group) % shards:
                fact = f"a tensor has {shards} shards and no devices, but the node has {len(group)}"
                self.problems.append(
                    Problem(self.where(node), fact, "shards divide the devices evenly", "name the devices")
                )
                return None
        return group

    def too_few_ranks(self, followed: Mapping[ir.Node, Followed]) -> Iterator[Problem]:
        """The problem of a plan with fewer ranks than the annotations use."""
        ranks = self.program.plan.ranks
        for node, one in followed.items():
            if one.group and max(one.group) >= ranks:
                fact = f"'{self.program.paths[node]}' is annotated for device {max(one.group)}, but there are {ranks} ranks"
                configuration = self.annotations.configuration
                law = f"the configuration '{configuration.name}' has {configuration.num_devices} devices; devices are ranks"
                help = f"set 'ranks' to {configuration.num_devices}, or say --configuration {NONE}"
                yield Problem(self.program.plan.file or self.program.name, fact, law, help)
                return
