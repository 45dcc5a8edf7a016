"""Semantic mutations of artifacts, hashes corrected: what a fault of the compiler would write. The checker refuses each, or it is harmless.

python tests/mutations.py 2000 [SEED]        so many mutations of every kind of artifact, and the share that is caught
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from mutated import change_manifest, correct
from onnx import NodeProto, TensorProto, numpy_helper
from partc.runtime import load_local
from partc.runtime.check import check_artifact
from partc.runtime.errors import PartcError
from partc.runtime.format import DOMAIN
from whole import compiled

Array = np.ndarray


@dataclass(frozen=True)
class Kind:
    """A kind of artifact: a model in ONNX text with the shapes of its weights, a plan, and the inputs of a step."""

    text: str
    weights: Mapping[str, tuple[int, ...]]
    plan: str
    inputs: Mapping[str, tuple[int, ...]]
    classes: Mapping[str, int]


MLP = """g (float[n, 6] x) => (float[n, 5] y) {
    [up] h = MatMul(x, v)  [shift] s = Add(h, b)  [act] t = Tanh(s)  [down] d = MatMul(t, w)  [last] y = Add(d, c) }"""
WEIGHTS = {"v": (6, 12), "b": (12,), "w": (12, 5), "c": (5,)}
LEARN = "train: {loss: {type: softmax_cross_entropy, logits: y, labels: label}, optimizer: %s%s}\n"
TWICE = "symbols: {n: {divisor: 4}}\n"
ADAM, SHARED = "{type: adam, lr: 0.1}", "{type: adam, lr: 0.1, shard: dp}"

KINDS = {
    "placed": Kind(MLP, WEIGHTS, "ranks: 3\nplacement: {up: 0, shift: 1, down: 2, last: 0}\n", {"x": (4, 6)}, {}),
    "sharded": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 3\nsharding: {up: colwise, down: rowwise, last: {in: [[1, 1], [1]]}}\n",
        {"x": (4, 6)},
        {},
    ),
    "exchanged": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 4\nsharding: {up: {in: [[4, 1], [1, 1]]}, down: {in: [[1, 4], [4, 1]]}}\n",
        {"x": (4, 6)},
        {},
    ),
    "two groups": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 4\nplacement: {up: [0, 1], shift: [0, 1], act: [0, 1], down: [2, 3], last: [2, 3]}\n"
        "sharding: {up: colwise, down: {in: [[2, 1], [1, 1]]}}\n",
        {"x": (4, 6)},
        {},
    ),
    "data parallel": Kind(
        MLP, WEIGHTS, TWICE + "ranks: 2\ndataset: data_parallel\n" + LEARN % (ADAM, ""), {"x": (4, 6)}, {"label": 5}
    ),
    "zero": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\n" + LEARN % (SHARED, ""),
        {"x": (4, 6)},
        {"label": 5},
    ),
    "tensor parallel training": Kind(
        MLP,
        WEIGHTS,
        TWICE
        + "ranks: 4\nmesh: {dp: 2, tp: 2}\ndataset: data_parallel\nsharding: {up: colwise, down: rowwise}\n"
        + LEARN % (ADAM, ""),
        {"x": (4, 6)},
        {"label": 5},
    ),
    "parts of a batch": Kind(
        MLP,
        WEIGHTS,
        TWICE + "ranks: 2\ndataset: data_parallel\n" + LEARN % (ADAM, ", accumulate: 2"),
        {"x": (4, 6)},
        {"label": 5},
    ),
}


def build(kind: Kind, folder: Path) -> Path:
    """The artifact of a kind."""
    rng = np.random.default_rng(5)
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {kind.text}')
    for name, shape in kind.weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    compiled(proto, kind.plan, folder)
    return folder


def run(kind: Kind, folder: Path) -> dict[str, Array] | str:
    """What one step gives and leaves, by name; the reason where it cannot be run."""
    rng = np.random.default_rng(6)
    values: dict[str, Any] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in kind.inputs.items()}
    values |= {name: rng.integers(0, count, 4) for name, count in kind.classes.items()}
    values |= {"lr": np.float32(0.1), "bias1": np.float32(0.1), "bias2": np.float32(0.001), "step": np.int64(0)}
    found: dict[str, Array] = {}
    try:
        with load_local(folder, trust=True, stall=5) as program:
            for _ in range(2):
                given = {port.name: np.asarray(values[port.name]) for port in program.inputs}
                found |= {name: np.asarray(value) for name, value in program(given).items()}
            for rank in program.ranks:
                found |= {f"{record.value} on {rank.rank}": array.copy() for record, array in rank.state.arrays()}
    except (PartcError, ValueError, KeyError, RuntimeError, OSError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return found


Models = dict[str, onnx.ModelProto]


@dataclass
class Draft:
    """An artifact while it is mutated: the models of its rank files, its manifest, and where chance decides."""

    models: Models
    manifest: dict[str, Any]
    chance: random.Random

    def file(self) -> str:
        """Any rank file."""
        return self.chance.choice(sorted(self.models))

    def calls(self, *ops: str) -> list[tuple[str, NodeProto]]:
        """The communication nodes of all files."""
        return [
            (file, node)
            for file, model in sorted(self.models.items())
            for node in model.graph.node
            if node.domain == DOMAIN and (not ops or node.op_type in ops)
        ]

    def alike(self, node: NodeProto) -> list[tuple[str, NodeProto]]:
        """The nodes of one message or collective in all files."""
        return [(file, other) for file, other in self.calls() if _number(other, "tag") == _number(node, "tag")]


def _attribute(node: NodeProto, *names: str) -> onnx.AttributeProto | None:
    return next((one for one in node.attribute if one.name in names), None)


def _number(node: NodeProto, name: str) -> int:
    found = _attribute(node, name)
    return -1 if found is None else found.i


Mutation = Callable[[Draft], bool]
"""Changes a draft; False where there is nothing of what it changes."""


def _chosen(draft: Draft, everywhere: bool, *ops: str) -> list[tuple[str, NodeProto]]:
    calls = draft.calls(*ops)
    if not calls:
        return []
    one = draft.chance.choice(calls)
    return draft.alike(one[1]) if everywhere else [one]


def _place(draft: Draft, file: str, node: NodeProto) -> int:
    return next(at for at, one in enumerate(draft.models[file].graph.node) if one is node or one == node)


def drop(everywhere: bool) -> Mutation:
    """A communication node is left out; its output, where it has one, is what it would have been made of."""

    def change(draft: Draft) -> bool:
        chosen = _chosen(draft, everywhere)
        for file, node in chosen:
            graph = draft.models[file].graph
            at = _place(draft, file, node)
            sources, results = list(node.input), list(node.output)
            del graph.node[at]
            for place, (source, result) in enumerate(zip(sources, results, strict=False)):
                graph.node.insert(
                    at + place, onnx.helper.make_node("Identity", [source], [result], name=f"dropped.{result}")
                )
        return bool(chosen)

    return change


def remove(draft: Draft) -> bool:
    """A collective is left out everywhere, in the manifest, too; its input stands for its output."""
    chosen = _chosen(draft, True, "AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Exchange")
    if not chosen or any(len(node.input) != len(node.output) for _, node in chosen):
        return False
    tag = _number(chosen[0][1], "tag")
    for file, node in chosen:
        graph, at = draft.models[file].graph, _place(draft, file, node)
        pairs = list(zip(node.input, node.output, strict=True))
        del graph.node[at]
        for source, result in pairs:
            graph.node.insert(at, onnx.helper.make_node("Identity", [source], [result], name=f"removed.{result}"))
    draft.manifest["collectives"] = [one for one in draft.manifest["collectives"] if one["tag"] != tag]
    return True


def duplicate(everywhere: bool) -> Mutation:
    """A communication node stands there twice; what it makes the second time has another name."""

    def change(draft: Draft) -> bool:
        chosen = _chosen(draft, everywhere)
        for file, node in chosen:
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.output[:] = [f"{name}.again" for name in node.output]
            copy.name += ".again"
            draft.models[file].graph.node.insert(_place(draft, file, node) + 1, copy)
        return bool(chosen)

    return change


def swap(everywhere: bool) -> Mutation:
    """Two communication nodes that follow one another change places."""

    def change(draft: Draft) -> bool:
        pairs = []
        for file, model in sorted(draft.models.items()):
            places = [at for at, node in enumerate(model.graph.node) if node.domain == DOMAIN]
            pairs += [(file, one, two) for one, two in itertools.pairwise(places)]
        if not pairs:
            return False
        file, one, two = draft.chance.choice(pairs)
        nodes = draft.models[file].graph.node
        tags = {_number(nodes[one], "tag"), _number(nodes[two], "tag")}
        done = False
        for name in sorted(draft.models) if everywhere else [file]:
            nodes = draft.models[name].graph.node
            places = [at for at, node in enumerate(nodes) if node.domain == DOMAIN and _number(node, "tag") in tags]
            if len(places) == 2:
                first, second = NodeProto(), NodeProto()
                first.CopyFrom(nodes[places[0]])
                second.CopyFrom(nodes[places[1]])
                nodes[places[0]].CopyFrom(second)
                nodes[places[1]].CopyFrom(first)
                done = True
        return done

    return change


def renumber(name: str, everywhere: bool) -> Mutation:
    """An attribute of a communication node that is a number is another one."""

    def change(draft: Draft) -> bool:
        calls = [one for one in draft.calls() if _attribute(one[1], name) is not None]
        if not calls:
            return False
        one = draft.chance.choice(calls)
        new = draft.chance.choice([n for n in range(-1, 5) if n != _number(one[1], name)])
        for _, node in draft.alike(one[1]) if everywhere else [one]:
            found = _attribute(node, name)
            if found is not None:
                found.i = new
        return True

    return change


def reduce(everywhere: bool) -> Mutation:
    """Another reduction."""

    def change(draft: Draft) -> bool:
        chosen = _chosen(draft, everywhere, "AllReduce", "ReduceScatter", "Reduce")
        for _, node in chosen:
            found = _attribute(node, "reduce")
            assert found is not None
            found.s = (
                draft.chance.choice([word for word in (b"max", b"min") if word != found.s])
                if not everywhere
                else b"max"
            )
        return bool(chosen)

    return change


def group(everywhere: bool) -> Mutation:
    """Another group, or the same list in another order."""

    def change(draft: Draft) -> bool:
        groups, chosen = draft.manifest["groups"], _chosen(draft, everywhere, *_COLLECTIVE)
        if not chosen:
            return False
        own = _attribute(chosen[0][1], "group")
        assert own is not None
        others = [name for name in groups if name.encode() != own.s]
        if not others:
            groups["turned"] = [list(reversed(ranks)) for ranks in groups[own.s.decode()]]
            others = ["turned"]
        other = draft.chance.choice(sorted(others)).encode()
        for _, node in chosen:
            found = _attribute(node, "group")
            assert found is not None
            found.s = other
        return True

    return change


_COLLECTIVE = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Exchange", "Broadcast", "Reduce")


def turn_group(draft: Draft) -> bool:
    """The ranks of a list in another order."""
    lists = [ranks for lists in draft.manifest["groups"].values() for ranks in lists if len(ranks) > 1]
    if lists:
        draft.chance.choice(lists).reverse()
    return bool(lists)


def boxes(name: str) -> Mutation:
    """Two boxes of an Exchange change places, or one is moved."""

    def change(draft: Draft) -> bool:
        calls = [
            one for one in draft.calls("Exchange") if (found := _attribute(one[1], name)) is not None and found.ints
        ]
        if not calls:
            return False
        node = draft.chance.choice(calls)[1]
        found, dims = _attribute(node, name), _number(node, "rank")
        assert found is not None
        numbers = list(found.ints)
        whole = [numbers[at : at + 3 * dims] for at in range(0, len(numbers), 3 * dims)]
        if len(whole) > 1 and draft.chance.random() < 0.5:
            one, two = draft.chance.sample(range(len(whole)), 2)
            whole[one], whole[two] = whole[two], whole[one]
        else:
            box = draft.chance.choice(whole)
            axis = draft.chance.randrange(dims)
            begin, end, of = box[3 * axis : 3 * axis + 3]
            step = end - begin
            begin = begin - step if begin >= step else begin + step
            box[3 * axis : 3 * axis + 3] = [begin, begin + step, of]
        if [number for box in whole for number in box] == numbers:
            return False
        found.ints[:] = [number for box in whole for number in box]
        return True

    return change


def peers(draft: Draft) -> bool:
    """Two peers of an Exchange change places."""
    lists = [
        found
        for _, node in draft.calls("Exchange")
        for name in ("send_peers", "recv_peers")
        if (found := _attribute(node, name)) is not None and len(set(found.ints)) > 1
    ]
    if not lists:
        return False
    found = draft.chance.choice(lists)
    one, two = draft.chance.sample(range(len(found.ints)), 2)
    if found.ints[one] == found.ints[two]:
        return False
    found.ints[one], found.ints[two] = found.ints[two], found.ints[one]
    return True


def types(draft: Draft) -> bool:
    """A value is declared of another type."""
    ports = list(draft.models[draft.file()].graph.value_info)
    if not ports:
        return False
    tensor = draft.chance.choice(ports).type.tensor_type
    tensor.elem_type = draft.chance.choice([kind for kind in (1, 6, 7, 10) if kind != tensor.elem_type])
    return True


def expressions(draft: Draft) -> bool:
    """A dim of a declared value is another one."""
    ports = [port for port in draft.models[draft.file()].graph.value_info if port.type.tensor_type.shape.dim]
    if not ports:
        return False
    dim = draft.chance.choice(list(draft.chance.choice(ports).type.tensor_type.shape.dim))
    if dim.HasField("dim_value"):
        dim.dim_value += 1
    else:
        dim.dim_param = draft.chance.choice([f"{dim.dim_param} + 1", f"2*({dim.dim_param})", f"({dim.dim_param})/2"])
    return True


def shapes(draft: Draft) -> bool:
    """A shape of the manifest is another one."""
    parts = ("collectives", "transfers", "inputs", "outputs", "state")
    records = [one for part in parts for one in draft.manifest[part] if one["shape"]]
    if not records:
        return False
    shape = draft.chance.choice(records)["shape"]
    axis = draft.chance.randrange(len(shape))
    shape[axis] = shape[axis] + 1 if isinstance(shape[axis], int) else f"2*({shape[axis]})"
    return True


def programs(draft: Draft) -> bool:
    """Two ranks change their programs, or one gets another one's."""
    count = draft.manifest["ranks"]
    names = draft.manifest["programs"] or [f"rank_{rank:04d}.onnx" for rank in range(count)]
    one, two = draft.chance.sample(range(count), 2)
    if names[one] == names[two]:
        return False
    names[one], names[two] = (names[two], names[one]) if draft.chance.random() < 0.5 else (names[two], names[two])
    draft.manifest["programs"] = names
    return True


def port_boxes(part: str) -> Mutation:
    """Two ranks change their pieces of an input, an output or a tensor."""

    def change(draft: Draft) -> bool:
        records = [
            one for one in draft.manifest[part] if one.get("boxes") and len({str(box) for box in one["boxes"]}) > 1
        ]
        if not records:
            return False
        places = draft.chance.choice(records)["boxes"]
        one, two = draft.chance.sample(range(len(places)), 2)
        if places[one] == places[two]:
            return False
        places[one], places[two] = places[two], places[one]
        return True

    return change


def weights(draft: Draft) -> bool:
    """Two ranks change the data of a weight."""
    by_name: dict[str, list[TensorProto]] = {}
    for _, model in sorted(draft.models.items()):
        for tensor in model.graph.initializer:
            by_name.setdefault(tensor.name, []).append(tensor)
    pairs = [some for some in by_name.values() if len(some) > 1]
    if not pairs:
        return False
    one, two = draft.chance.sample(draft.chance.choice(pairs), 2)
    if one.external_data and two.external_data:
        for key in ("location", "offset"):
            first, second = (next(entry for entry in each.external_data if entry.key == key) for each in (one, two))
            first.value, second.value = second.value, first.value
    elif one.raw_data and two.raw_data and one.dims == two.dims:
        one.raw_data, two.raw_data = two.raw_data, one.raw_data
    else:
        return False
    return True


def offset(draft: Draft) -> bool:
    """A weight's data begins elsewhere."""
    tensors = [one for one in draft.models[draft.file()].graph.initializer if one.external_data]
    if not tensors:
        return False
    entry = next(one for one in draft.chance.choice(tensors).external_data if one.key == "offset")
    entry.value = str(int(entry.value) + draft.chance.choice([-256, -4, 4, 64, 256]))
    return True


def rewire(draft: Draft) -> bool:
    """A communication node reads another value of the same type and shape."""
    file, node = draft.chance.choice(draft.calls() or [("", NodeProto())])
    if not file or not node.input:
        return False
    graph = draft.models[file].graph
    types = {port.name: port.type.SerializeToString(deterministic=True) for port in (*graph.value_info, *graph.input)}
    made = {name for one in graph.node[: _place(draft, file, node)] for name in one.output}
    at = draft.chance.randrange(len(node.input))
    others = [
        name for name in sorted(made) if name != node.input[at] and types.get(name) == types.get(node.input[at], b"")
    ]
    if not others:
        return False
    node.input[at] = draft.chance.choice(others)
    return True


MUTATIONS: dict[str, Mutation] = {
    "drop on one rank": drop(False),
    "drop on all": drop(True),
    "remove everywhere": remove,
    "duplicate on one rank": duplicate(False),
    "duplicate on all": duplicate(True),
    "swap on one rank": swap(False),
    "swap on all": swap(True),
    "peer": renumber("peer", False),
    "tag on one rank": renumber("tag", False),
    "tag on all": renumber("tag", True),
    "axis on one rank": renumber("axis", False),
    "axis on all": renumber("axis", True),
    "split axis on all": renumber("split_axis", True),
    "root on all": renumber("root", True),
    "reduction on one rank": reduce(False),
    "reduction on all": reduce(True),
    "group on one rank": group(False),
    "group on all": group(True),
    "order of a group": turn_group,
    "boxes given": boxes("send_boxes"),
    "boxes taken": boxes("recv_boxes"),
    "peers of an exchange": peers,
    "declared type": types,
    "declared dim": expressions,
    "shape in the manifest": shapes,
    "programs": programs,
    "pieces of an input": port_boxes("inputs"),
    "pieces of an output": port_boxes("outputs"),
    "pieces of a tensor": port_boxes("state"),
    "weights of two ranks": weights,
    "offset": offset,
    "another value sent": rewire,
}


NOT_IN_THE_FILES = ("remove everywhere", "pieces of an input", "another value sent")
"""What no checker can tell without the model: the files are those of another model, each as sound as the other."""


def mutate(name: str, source: Path, target: Path, seed: str) -> bool:
    """A copy of an artifact with one mutation; False where it has nothing of that."""
    shutil.copytree(source, target)
    inner = sorted(path.parent for path in target.rglob("manifest.json"))
    chance = random.Random(seed)
    folder = chance.choice(inner) if len(inner) > 1 and chance.random() < 0.3 else target
    models = {path.name: onnx.load(path, load_external_data=False) for path in sorted(folder.glob("rank_*.onnx"))}
    done = False

    def change(data: dict[str, Any]) -> None:
        nonlocal done
        done = MUTATIONS[name](Draft(models, data, chance))

    change_manifest(folder, change)
    for file, model in models.items():
        (folder / file).write_bytes(model.SerializeToString(deterministic=True))
    correct(target)
    return done


def same(one: dict[str, Array] | str, two: dict[str, Array] | str) -> bool:
    """Whether two runs gave and left the same, up to the order of sums."""
    if isinstance(one, str) or isinstance(two, str) or one.keys() != two.keys():
        return False
    return all(one[name].shape == two[name].shape and np.allclose(one[name], two[name], 1e-5, 1e-6) for name in one)


def judge(kind: Kind, source: Path, wanted: dict[str, Array] | str, name: str, seed: str) -> str:
    """`refused`, `harmless`, `none` where there is nothing to mutate, or what came of a mutation that the checker does not tell."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "build"
        if not mutate(name, source, target, seed):
            return "none"
        if check_artifact(target):
            return "refused"
        found = run(kind, target)
        if same(wanted, found):
            return "harmless"
        return found.splitlines()[0] if isinstance(found, str) else "other results"


def sweep(count: int, seed: int, names: Sequence[str] = tuple(KINDS)) -> tuple[Counter[str], list[str]]:
    """So many mutations of each kind of artifact, each seeded; how they ended, and those that were missed."""
    ends: Counter[str] = Counter()
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            source = build(KINDS[name], Path(scratch) / name)
            wanted = run(KINDS[name], source)
            assert not isinstance(wanted, str), wanted
            order = random.Random(f"{seed} {name}")
            mutations = [
                mutation
                for _ in range(count // len(MUTATIONS) + 1)
                for mutation in order.sample(sorted(MUTATIONS), len(MUTATIONS))
            ]
            for at, mutation in enumerate(mutations[:count]):
                end = judge(KINDS[name], source, wanted, mutation, f"{seed} {name} {at}")
                ends[end if end in ("refused", "harmless", "none") else "missed"] += 1
                if end not in ("refused", "harmless", "none"):
                    missed.append(f"{name}, {mutation}, {at}: {end}")
    return ends, missed


def told(ends: Counter[str]) -> str:
    """The share that was caught, of those that matter."""
    matter = ends["refused"] + ends["missed"]
    return f"{ends['refused']} of {matter} mutations refused ({100 * ends['refused'] / max(matter, 1):.1f} %), {ends['harmless']} harmless"


if __name__ == "__main__":
    counted, lost = sweep(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print("\n".join([*lost, told(counted)]))
