"""Faults of stored parameters, planted in sound artifacts, hashes corrected: each is refused by `partc check`, which names it.

    python tests/fuzz/stored_faults.py --cases 60 --seed 1     faults of all kinds, in turn, and a table
    python tests/fuzz/stored_faults.py --case 17 --seed 1      one of them, with what `check` says

Each is what a fault of the compiler would write: in the files of all ranks, or of one. A fault is named if a violation has the name of a
value, a node or a unit that it changed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from mutated import correct
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.artifact.format import DOMAIN, TASKS
from partc.runtime.checker.check import check_artifact
from training_equivalence import source_of
from training_models import gpt

STORED = 'parameters: {"**": {stored: %s}}\n'
BATCH = "symbols: {batch: {divisor: 12, max: 12}, seq: {max: 8}}\n"
TRAIN = "train: {loss: {type: softmax_cross_entropy, logits: y, labels: labels, axis: 2}, optimizer: {type: adamw, lr: 0.01}}\n"
TWO = f"ranks: 2\nmesh: {{dp: 2}}\n{BATCH}dataset: {{x: [dp, null], labels: [dp, null]}}\n{STORED % 'dp'}"
PLANS = {
    "freed": TWO + TRAIN,
    "kept": TWO.replace("stored: dp", "stored: dp, after_forward: keep") + TRAIN,
    "recomputed": TWO + 'pipeline: {microbatches: 1, recompute: ["layers.*"]}\n' + TRAIN,
    "sixteen bits": TWO + "precision: {compute: bfloat16}\n" + TRAIN,
    "replicas": f"ranks: 4\nmesh: {{replica: 2, shard: 2}}\n{BATCH}"
    "dataset: {x: [[replica, shard], null], labels: [[replica, shard], null]}\n" + STORED % "shard" + TRAIN,
    "microbatches": TWO + "stored: {reduce: microbatch}\npipeline: {microbatches: 3}\n" + TRAIN,
    "stages": f"ranks: 4\nmesh: {{pp: 2, dp: 2}}\n{BATCH}dataset: {{x: [dp, null], labels: [dp, null]}}\n{STORED % 'dp'}"
    'pipeline: {microbatches: 3, schedule: 1f1b, stages: ["tokens, positions, layers.[0-1]", "layers.2, norm, head"]}\n'
    + TRAIN,
}


def build(name: str, folder: Path) -> Path:
    """A small GPT of three layers by one of the plans."""
    source = source_of(gpt(width=8, layers=3, heads=2, vocabulary=12, context=8))
    compile_source(source, parse_plan(PLANS[name], "plan.yaml"), folder, check=False)
    return folder


@dataclass
class Draft:
    """The files of an artifact in which a fault is planted; `names`: of what was changed."""

    manifest: dict[str, Any]
    models: dict[str, ModelProto]
    chance: random.Random
    names: set[str] = field(default_factory=set)

    @property
    def stored(self) -> dict[str, Any]:
        """The manifest's record of stored parameters."""
        found: dict[str, Any] = self.manifest["programs"]["train"]["stored"]
        return found

    @property
    def units(self) -> dict[str, str]:
        """Maps each stored parameter to its unit."""
        return {tensor: unit["unit"] for unit in self.stored["units"] for tensor in unit["tensors"]}

    def bodies(self) -> list[tuple[str, Any]]:
        """The nodes of each file, and of the bodies of its tasks, each with a key that is equal for alike bodies of all files."""
        found: list[tuple[str, Any]] = []
        for file in sorted(self.models):
            model = self.models[file]
            found.append((f"{file}", model.graph.node))
            found += [(f"{file} {one.name}", one.node) for one in model.functions if one.domain == TASKS]
        return found

    def everywhere(self, choose: Callable[[Any], Any], act: Callable[[Any, Any], None], one: bool) -> bool:
        """Chooses by the first body that has a choice, and acts on each body that has it, too; of one file only with `one`.

        `choose` gives the choices of a body's nodes, which are equal in all files; `act` changes a body by a choice.
        """
        bodies = self.bodies()
        choices = [(key, choice) for key, nodes in bodies for choice in choose(nodes)]
        if not choices:
            return False
        own, choice = self.chance.choice(choices)
        for key, nodes in bodies:
            if (key == own or not one) and choice in choose(nodes):
                act(nodes, choice)
        return True

    def change(self, changed: Any) -> None:
        """Changes the manifest's records of collectives of the training."""
        program = self.manifest["programs"]["train"]
        program["collectives"] = [new for old in program["collectives"] if (new := changed(old)) is not None]


def calls(nodes: Any, op: str) -> list[NodeProto]:
    """The messages of a kind in a body."""
    return [node for node in nodes if node.domain == DOMAIN and node.op_type == op]


def place(nodes: Any, name: str) -> int:
    """The place of the node of this name."""
    return next(k for k, node in enumerate(nodes) if node.name == name)


def move(nodes: Any, at: int, to: int) -> None:
    """Moves a node of a body."""
    order = [*nodes]
    order.insert(to, order.pop(at))
    copies = [NodeProto.FromString(node.SerializeToString()) for node in order]
    del nodes[:]
    nodes.extend(copies)


def gathers(draft: Draft, nodes: Any) -> list[tuple[NodeProto, tuple[str, ...]]]:
    """The gathers of units in a body, each with the parameters that it gathers."""
    units = draft.units
    casts = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Cast"}
    found = [(node, tuple(casts.get(name, name) for name in node.input)) for node in calls(nodes, "AllGather")]
    return [(node, names) for node, names in found if names[0] in units]


def whole(draft: Draft, nodes: Any) -> dict[str, tuple[str, int]]:
    """Maps each gathered value of a body to its parameter and the place of its event."""
    return {
        value: (name, place(nodes, node.name))
        for node, names in gathers(draft, nodes)
        for value, name in zip(node.output, names, strict=True)
    }


def readers(nodes: Any, values: Any) -> list[tuple[int, int, str]]:
    """The places of the nodes that read these values, the input's number, and the value."""
    return [
        (at, k, name)
        for at, node in enumerate(nodes)
        for k, name in enumerate(node.input)
        if name in values and node.domain != DOMAIN
    ]


def other_region(draft: Draft, one: bool) -> bool:
    """A node reads what another region of the unit has gathered."""

    def choose(nodes: Any) -> list[tuple[str, int, str]]:
        values = whole(draft, nodes)
        return [
            (nodes[at].name, k, other)
            for at, k, name in readers(nodes, values)
            for other, (tensor, event) in values.items()
            if other != name and tensor == values[name][0] and event < at
        ]

    return draft.everywhere(choose, lambda nodes, choice: reads_instead(draft, nodes, choice), one)


def reads_instead(draft: Draft, nodes: Any, choice: tuple[str, int, str]) -> None:
    """A node reads another value."""
    node, k, value = choice
    draft.names |= {node, value}
    nodes[place(nodes, node)].input[k] = value


def shape_of(draft: Draft, tensor: str) -> tuple[int, ...]:
    """The shape of a stored parameter."""
    return next(tuple(one["shape"]) for one in draft.manifest["state"] if one["tensor"] == tensor)


def other_unit(draft: Draft, one: bool) -> bool:
    """A node reads what another unit has gathered, of the same shape."""

    def choose(nodes: Any) -> list[tuple[str, int, str]]:
        values = whole(draft, nodes)
        return [
            (nodes[at].name, k, other)
            for at, k, name in readers(nodes, values)
            for other, (tensor, event) in values.items()
            if event < at
            and draft.units[tensor] != draft.units[values[name][0]]
            and shape_of(draft, tensor) == shape_of(draft, values[name][0])
        ]

    return draft.everywhere(choose, lambda nodes, choice: reads_instead(draft, nodes, choice), one)


def shift(draft: Draft, one: bool, to: Callable[[Any, NodeProto], list[int]]) -> bool:
    """The event of a unit is at another place of its body; `to` gives the places."""

    def choose(nodes: Any) -> list[tuple[str, int]]:
        found = gathers(draft, nodes)
        return [(node.name, nth) for node, _ in found for nth in range(len(to(nodes, node)))]

    def act(nodes: Any, choice: tuple[str, int]) -> None:
        name, nth = choice
        node = nodes[place(nodes, name)]
        draft.names |= {name, *node.output, *(draft.units.get(one, one) for one in node.input)}
        move(nodes, place(nodes, name), to(nodes, node)[nth])

    return draft.everywhere(choose, act, one)


def early(draft: Draft, one: bool) -> bool:
    """A unit is gathered before units that are read earlier."""

    def to(nodes: Any, node: NodeProto) -> list[int]:
        at = place(nodes, node.name)
        others = [place(nodes, event.name) for event, _ in gathers(draft, nodes)]
        return [other for other in others if other < at][:-2]

    return shift(draft, one, to)


def before_last_reader(draft: Draft, one: bool) -> bool:
    """A unit is gathered again before the last reader of what it gathered before."""

    def to(nodes: Any, node: NodeProto) -> list[int]:
        at, values = place(nodes, node.name), whole(draft, nodes)
        own = {values[name][0] for name in node.output}
        earlier = [name for name, (tensor, event) in values.items() if tensor in own and event < at]
        last = max((where for where, _, _ in readers(nodes, earlier)), default=-1)
        return [last] if 0 <= last < at else []

    return shift(draft, one, to)


def after_update(draft: Draft, one: bool) -> bool:
    """A unit is gathered, and read, after the update of what it gathers: the update is moved before its last event."""

    def choose(nodes: Any) -> list[str]:
        values = whole(draft, nodes)
        events: dict[str, int] = {}
        for tensor, event in values.values():
            events[tensor] = max(event, events.get(tensor, -1))
        return [node.name for node in nodes if "adam" in node.op_type.lower() and node.input[0] in events]

    def act(nodes: Any, name: str) -> None:
        at = place(nodes, name)
        tensor = nodes[at].input[0]
        event = max(event for own, event in whole(draft, nodes).values() if own == tensor)
        draft.names |= {name, tensor}
        move(nodes, at, event)
        nodes[event].input[1] = nodes[event].input[0]  # no gradient is there yet

    return draft.everywhere(choose, act, one)


def missing(draft: Draft, one: bool) -> bool:
    """A unit is not gathered again: its readers read what it gathered before."""

    def choose(nodes: Any) -> list[str]:
        values = whole(draft, nodes)
        return [
            node.name
            for node, names in gathers(draft, nodes)
            if all(any(own == name and at < place(nodes, node.name) for own, at in values.values()) for name in names)
        ]

    def act(nodes: Any, name: str) -> None:
        at, values = place(nodes, name), whole(draft, nodes)
        node = nodes[at]
        draft.names |= {name, *node.output, *(draft.units[values[value][0]] for value in node.output)}
        first = {tensor: value for value, (tensor, event) in reversed(values.items()) if event < at}
        instead = {value: first[values[value][0]] for value in node.output}
        made = {*node.output}
        del nodes[at]
        for other in nodes:
            for k, read in enumerate(other.input):
                other.input[k] = instead.get(read, read)
        if not one:
            draft.change(lambda record: None if record["value"] in made else record)

    return draft.everywhere(choose, act, one)


def swapped_order(draft: Draft, one: bool) -> bool:
    """Ranks gather two units in different orders."""

    def choose(nodes: Any) -> list[tuple[str, str]]:
        names = [node.name for node, _ in gathers(draft, nodes)]
        return [*pairwise(names)]

    def act(nodes: Any, pair: tuple[str, str]) -> None:
        first, second = (place(nodes, name) for name in pair)
        draft.names |= {*pair, *nodes[first].output, *nodes[second].output}
        move(nodes, second, first)

    return draft.everywhere(choose, act, True)


def pairs_of(nodes: Any, op: str, side: str) -> Iterator[tuple[str, int, str, int]]:
    """Pairs of operands of messages of a kind, by the message's name and the operand's number."""
    events = [(node.name, k) for node in calls(nodes, op) for k in range(len(getattr(node, side)))]
    for first in events:
        for second in events:
            if first < second:
                yield (*first, *second)


def scattered(draft: Draft, one: bool) -> bool:
    """A ReduceScatter sums the gradient of another unit's parameter of the same shape."""

    def choose(nodes: Any) -> list[tuple[str, int, str, int]]:
        outputs = {node.name: [*node.output] for node in calls(nodes, "ReduceScatter")}

        def tensor(name: str, k: int) -> str:
            return outputs[name][k].partition(".grad")[0]

        return [
            pair
            for pair in pairs_of(nodes, "ReduceScatter", "input")
            if {tensor(*pair[:2]), tensor(*pair[2:])} <= draft.units.keys()
            and draft.units[tensor(*pair[:2])] != draft.units[tensor(*pair[2:])]
            and shape_of(draft, tensor(*pair[:2])) == shape_of(draft, tensor(*pair[2:]))
        ]

    def act(nodes: Any, pair: tuple[str, int, str, int]) -> None:
        (first, k), (second, n) = ((nodes[place(nodes, name)], at) for name, at in (pair[:2], pair[2:]))
        draft.names |= {first.name, second.name, first.output[k], second.output[n]}
        first.output[k], second.output[n] = second.output[n], first.output[k]

    return draft.everywhere(choose, act, one)


def exchanged(draft: Draft, one: bool) -> bool:
    """Two parameters of a unit, of the same shape, get what was gathered of each other."""

    def choose(nodes: Any) -> list[tuple[str, int, int]]:
        return [
            (node.name, k, n)
            for node, names in gathers(draft, nodes)
            for n in range(len(names))
            for k in range(1, n)
            if shape_of(draft, names[k]) == shape_of(draft, names[n])
        ]

    def act(nodes: Any, choice: tuple[str, int, int]) -> None:
        name, k, n = choice
        node = nodes[place(nodes, name)]
        draft.names |= {name, node.output[k], node.output[n]}
        node.output[k], node.output[n] = node.output[n], node.output[k]

    return draft.everywhere(choose, act, one)


def other_shard(draft: Draft, one: bool) -> bool:
    """An event gathers a shard of another parameter of the same shape."""

    def choose(nodes: Any) -> list[tuple[str, int, str]]:
        events = gathers(draft, nodes)
        return [
            (node.name, k, other)
            for node, names in events
            for k, name in enumerate(names)
            for other in draft.units
            if node.input[k] == name
            and other != name
            and shape_of(draft, other) == shape_of(draft, name)
            and any(other in some for _, some in events)
        ]

    return draft.everywhere(choose, lambda nodes, choice: reads_instead(draft, nodes, choice), one)


def other_gradient(draft: Draft, one: bool) -> bool:
    """An update reads the gradient of another module's parameter of the same shape; within a module only `verify` tells them apart."""

    def choose(nodes: Any) -> list[tuple[str, int, str]]:
        updates = [node for node in nodes if "adam" in node.op_type.lower() and node.input[0] in draft.units]
        first = place(nodes, updates[0].name) if updates else 0
        there = {value for node in [*nodes][:first] for value in node.output}
        return [
            (node.name, 1, other.input[1])
            for node in updates
            for other in updates
            if other.input[0].rpartition(".")[0] != node.input[0].rpartition(".")[0]
            and other.input[1] in there
            and shape_of(draft, other.input[0]) == shape_of(draft, node.input[0])
        ]

    return draft.everywhere(choose, lambda nodes, choice: reads_instead(draft, nodes, choice), one)


def left_out(draft: Draft, one: bool) -> bool:
    """A rank does not take part in an event whose values it does not need, as if another region's were read."""

    def choose(nodes: Any) -> list[str]:
        values = whole(draft, nodes)
        return [
            node.name
            for node, names in gathers(draft, nodes)
            if all(sum(own == name for own, _ in values.values()) > 1 for name in names)
        ]

    def act(nodes: Any, name: str) -> None:
        at, values = place(nodes, name), whole(draft, nodes)
        node = nodes[at]
        draft.names |= {name, *node.output, *(draft.units[values[value][0]] for value in node.output)}
        other = {tensor: value for value, (tensor, event) in values.items() if event != at}
        instead = {value: other[values[value][0]] for value in node.output}
        if any(values[value][1] > at for value in instead.values()):
            event = values[next(iter(instead.values()))][1]
            move(nodes, event, at)
            at += 1
        del nodes[at]
        for reader in nodes:
            for k, read in enumerate(reader.input):
                reader.input[k] = instead.get(read, read)

    return draft.everywhere(choose, act, True)


def other_group(draft: Draft, one: bool) -> bool:
    """A unit is gathered among other ranks, the manifest says so, too."""
    groups = sorted(draft.manifest["groups"])
    names = sorted({node.name for _, nodes in draft.bodies() for node, _ in gathers(draft, nodes)})
    if len(groups) < 2 or not names:
        return False
    name, group = draft.chance.choice(names), draft.chance.choice(groups)
    values = set[str]()
    for _, nodes in draft.bodies():
        for node, _ in gathers(draft, nodes):
            own = next(one for one in node.attribute if one.name == "group")
            if node.name == name and own.s != group.encode():
                own.s = group.encode()
                values |= {*node.output}
    draft.names |= {name, *values}
    draft.change(lambda record: {**record, "group": group} if record["value"] in values else record)
    return bool(values)


def record_of_unit(draft: Draft, one: bool) -> bool:
    """The manifest says other bytes, gathers, tensors or ranks of a unit, or that it is kept where it is freed."""
    unit = draft.chance.choice(draft.stored["units"])
    draft.names |= {unit["unit"], "stored"}
    match draft.chance.choice(("bytes", "gathers", "tensors", "ranks")):
        case "bytes":
            unit["bytes"] += 4
        case "gathers":
            unit["gathers"] += draft.chance.choice((-1, 1))
        case "tensors":
            if len(unit["tensors"]) < 2:
                return False
            draft.names.add(unit["tensors"].pop(draft.chance.randrange(len(unit["tensors"]))))
        case "ranks":
            unit["ranks"].pop()
    return True


def record_of_peak(draft: Draft, one: bool) -> bool:
    """The manifest says another peak of a rank, or none."""
    draft.names.add("stored: rank")
    at = draft.chance.randrange(len(draft.stored["peaks"]))
    peak = draft.stored["peaks"][at]
    if draft.chance.random() < 0.3:
        del draft.stored["peaks"][at]
    else:
        peak["bytes"] += draft.chance.choice((-1024, -4))
    return True


KINDS: dict[str, Callable[[Draft, bool], bool]] = {
    "reads another region's value": other_region,
    "reads another unit's value": other_unit,
    "gathered too early": early,
    "gathered again before the last reader": before_last_reader,
    "updated before it is gathered": after_update,
    "not gathered again": missing,
    "other order on a rank": swapped_order,
    "ReduceScatter of another unit": scattered,
    "two parameters exchanged": exchanged,
    "shard of another parameter": other_shard,
    "gradient of another parameter": other_gradient,
    "left out on a rank": left_out,
    "other ranks": other_group,
    "record of a unit": record_of_unit,
    "record of the peak": record_of_peak,
}


def plant(source: Path, target: Path, kind: str, seed: str) -> set[str]:
    """Plants a fault of a kind in a copy of an artifact; returns the names of what it changed, if it has a place."""
    chance = random.Random(seed)
    files = {path.name: onnx.load(path, load_external_data=False) for path in sorted(source.glob("rank_*.onnx"))}
    draft = Draft(json.loads((source / "manifest.json").read_text()), files, chance)
    one = chance.random() < 0.4
    if not KINDS[kind](draft, one):
        return set()
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for file, model in files.items():
        (target / file).write_bytes(model.SerializeToString(deterministic=True))
    (target / "manifest.json").write_text(json.dumps(draft.manifest))
    correct(target)
    return {name for name in draft.names if name}


def cases(
    count: int, seed: int, scratch: Path, only: int | None, plans: Sequence[str]
) -> Iterator[tuple[int, str, str, set[str], str]]:
    """So many faults: the case, the plan, the kind, the names of what was changed, and what `check` says."""
    built: dict[str, Path] = {}
    pairs = [(kind, plans[(at + turn) % len(plans)]) for turn in range(len(plans)) for at, kind in enumerate(KINDS)]
    made = 0
    for at in range(50 * count):
        if made == count:
            return
        kind, name = pairs[at % len(pairs)]
        if name not in built:
            built[name] = build(name, scratch / name.replace(" ", "_"))
            assert not (wrong := check_artifact(built[name])), wrong[0]
        if names := plant(built[name], scratch / "fault", kind, f"{seed} {at}"):
            if only in (None, made):
                yield made, name, kind, names, "\n".join(map(str, check_artifact(scratch / "fault")))
            made += 1


def main() -> int:
    """Prints each fault that was not found, or found and not named, and a table by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int)
    parser.add_argument("--only", choices=PLANS, help="faults of this plan alone")
    said = parser.parse_args()
    ends: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        plans = [said.only] if said.only else [*PLANS]
        count = said.cases if said.case is None else said.case + 1
        for case, plan, kind, names, text in cases(count, said.seed, Path(folder), said.case, plans):
            end = "missed" if not text else "named" if any(name in text for name in names) else "not named"
            ends[kind][end] += 1
            if end != "named" or said.case is not None:
                print(f"{case}: {end}: {plan}: {kind}: {', '.join(sorted(names))[:300]}\n{text[:2000]}", flush=True)
    total = sum(ends.values(), Counter())
    for kind, own in ends.items():
        print(f"{kind:40} {own['named']:4} named {own['not named']:4} not named {own['missed']:4} missed")
    print(f"{total.total()} faults: {total['named']} named, {total['not named']} not named, {total['missed']} missed")
    return total["not named"] + total["missed"]


if __name__ == "__main__":
    sys.exit(bool(main()))
