"""Artifacts that compute something else, hashes corrected: the share that `partc check` refuses, by class of mutant and by scope.

    python tests/fuzz/semantic_mutants.py 300 [--seed 1]           mutants of all artifacts, a table, and each missed one
    python tests/fuzz/semantic_mutants.py 300 --only generation    of one artifact

A mutant changes a node, a constant, a weight or a collective, by its name: in the files of one rank in all programs, in all files of one
program, or in all files. It counts where a step of it gives other numbers than the artifact gives: some are harmless. What is refused
when it is loaded or run is told apart, since no wrong number comes of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from decoder_layouts import TENSOR
from decoders import VOCABULARY, decoder
from equivalence import compiled
from mutated import correct
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.artifact.format import DIGEST, DOMAIN, PIECE
from partc.runtime.checker.check import check_artifact
from training_equivalence import evaluated, fed, source_of
from training_models import gpt

Array = np.ndarray
Results = dict[str, Array] | str

BLOCKS = 'sharding: {"layers.*.*.project": colwise, "layers.*.*.out": rowwise, tokens: {parameters: {weight: [tp, null]}}, head: colwise}\n'
LOSS = "train: {loss: {type: softmax_cross_entropy, logits: y, labels: labels, axis: 2}, optimizer: {type: adam, lr: 0.01%s}}\n"
BATCH = "symbols: {batch: {divisor: 4}}\n"
PLANS = {
    "generation": f"ranks: 2\n{TENSOR}generate: {{slots: 2, length: 16, chunk: 4}}\n",
    "encoder": "ranks: 2\nmesh: {tp: 2}\n" + BLOCKS,
    "groups": f"ranks: 4\nmesh: {{dp: 2, tp: 2}}\n{BATCH}dataset: {{x: [dp, null], labels: [dp, null]}}\n{BLOCKS}"
    + LOSS % "",
    "zero": f"ranks: 2\nmesh: {{dp: 2}}\n{BATCH}dataset: data_parallel\n" + LOSS % ", shard: dp",
    "pipeline": f"ranks: 2\n{BATCH}placement: {{tokens: 0, positions: 0, layers.0: 0, layers.1: 1, norm: 1, head: 1}}\n"
    "pipeline: {microbatches: 4, schedule: 1f1b}\n" + LOSS % "",
}


def build(name: str, folder: Path) -> Path:
    """A small artifact of a kind of program."""
    if name == "generation":
        compiled(decoder(layers=2, fused=True), PLANS[name], folder, check=False)
    else:
        source = source_of(gpt(width=8, layers=2, heads=2, vocabulary=12, context=8))
        compile_source(source, parse_plan(PLANS[name], "plan.yaml"), folder, check=False)
    return folder


def run(folder: Path) -> Results:
    """What some steps of all programs give and leave, by name; the reason where they cannot be run."""
    rng = np.random.default_rng(6)
    found: dict[str, Array] = {}
    try:
        with load_local(folder, trust=True, stall=3) as program:
            if program.manifest.training is None and any(port.name == "x" for port in program.inputs):
                found |= program({"x": rng.integers(0, 12, (3, 5))})
            elif program.manifest.training is None:
                prefill = program.sibling_program("prefill")
                for slot in range(2):
                    prefill.at_slots([slot])
                    found |= _named(f"prefill {slot}", prefill, _tokens(rng, 1, 4, 0))
                for position in (4, 5):
                    found |= _named(f"decode {position}", program, _tokens(rng, 2, 1, position))
            else:
                steps = [{name: rng.integers(0, 12, (8, 5)) for name in ("x", "labels")} for _ in range(2)]
                for at, step in enumerate(steps):
                    found |= {
                        f"{name} {at}": np.asarray(value)
                        for name, value in program({**fed(program, at), **step}).items()
                    }
                for at, values in enumerate(evaluated(program, steps)):
                    found |= {f"evaluate {at} {name}": np.asarray(value) for name, value in values.items()}
            for rank in program.ranks:
                found |= {f"{record.value} on {rank.rank}": array.copy() for record, array in rank.state.arrays()}
    except Exception as error:  # whatever a mutant does, it is told
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def _tokens(rng: np.random.Generator, rows: int, width: int, position: int) -> dict[str, Array]:
    counts = {"position": np.full(rows, position, np.int64), "count": np.full(rows, width, np.int64)}
    return {"ids": rng.integers(0, VOCABULARY, (rows, width)), **counts}


def _named(name: str, program: Any, given: Mapping[str, Array]) -> dict[str, Array]:
    made = program({port.name: given[port.name] for port in program.inputs})
    return {f"{name} {key}": np.asarray(value).copy() for key, value in made.items()}


def same(one: Results, two: Results) -> bool:
    """Whether two runs gave and left the same, up to the order of sums."""
    if isinstance(one, str) or isinstance(two, str) or one.keys() != two.keys():
        return False
    return all(np.allclose(one[name], two[name], 1e-5, 1e-6, equal_nan=True) for name in one)


@dataclass
class Draft:
    """The files of an artifact that a mutant changes: those in its `scope` are `models`, all of them `files`."""

    manifest: dict[str, Any]
    files: dict[str, ModelProto]
    models: dict[str, ModelProto]
    chance: random.Random
    programs: Sequence[str] = ()
    target: str = field(default="", init=False)

    def nodes(self, name: str = "", plain: bool = True) -> list[NodeProto]:
        """The nodes of the files in scope, also those of tasks; those of a name, or all."""
        return [
            node
            for model in self.models.values()
            for nodes in (model.graph.node, *(one.node for one in model.functions if one.domain == "partc.task"))
            for node in nodes
            if (not plain or node.domain != DOMAIN) and (not name or node.name == name)
        ]

    def draw(self, candidates: Sequence[NodeProto]) -> list[NodeProto]:
        """All nodes of the name of a drawn one."""
        if not candidates:
            return []
        self.target = self.chance.choice(sorted({node.name for node in candidates}))
        return [node for node in candidates if node.name == self.target]

    def weights(self, external: bool) -> dict[str, list[TensorProto]]:
        """By name the weights of the files in scope, or the constants inside of them."""
        found: dict[str, list[TensorProto]] = defaultdict(list)
        for model in self.models.values():
            for tensor in model.graph.initializer:
                named = any(entry.key == PIECE for entry in tensor.metadata_props)
                if (named and len(tensor.dims) > 0 and tensor.data_type == TensorProto.FLOAT) == external:
                    found[tensor.name].append(tensor)
        return found


ALIKE = (
    ("Tanh", "Relu", "Sigmoid", "Exp", "Gelu", "Neg", "Sqrt", "Reciprocal", "Identity", "Ceil"),
    ("Add", "Sub", "Mul", "Div", "Max", "Min"),
    ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"),
    ("LessOrEqual", "Less", "Greater", "GreaterOrEqual", "Equal"),
    ("Softmax", "LogSoftmax"),
)


def op(draft: Draft) -> bool:
    """A node is of another op with the same operands."""
    others = {one: [other for other in ops if other != one] for ops in ALIKE for one in ops}
    nodes = draft.draw(
        [
            node
            for node in draft.nodes()
            if (node.op_type in others and not node.domain and not node.attribute) or node.op_type.startswith("Reduce")
        ]
    )
    if not nodes:
        return False
    kind = draft.chance.choice(others.get(nodes[0].op_type, ["ReduceSum"]))
    for node in nodes:
        node.op_type = kind
    return True


def attribute(draft: Draft) -> bool:
    """An attribute of a node is another number."""
    kinds = (AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT)
    nodes = draft.draw([node for node in draft.nodes() if any(one.type in kinds for one in node.attribute)])
    if not nodes:
        return False
    name = draft.chance.choice([one.name for one in nodes[0].attribute if one.type in kinds])
    step, swap = draft.chance.choice((1, -1)), draft.chance.random()
    for node in nodes:
        for one in node.attribute:
            if one.name == name and one.type == AttributeProto.INT:
                one.i += step
            elif one.name == name and one.type == AttributeProto.FLOAT:
                one.f = one.f * 1.5 + 0.01
            elif one.name == name and len(one.ints) > 1:
                at = int(swap * (len(one.ints) - 1))
                one.ints[at], one.ints[at + 1] = one.ints[at + 1], one.ints[at]
    return True


def constant(draft: Draft) -> bool:
    """An element of a constant is another number."""
    inline = draft.weights(False)
    values = {
        node.name: [one for one in draft.nodes(node.name) if one.op_type == "Constant"]
        for node in draft.nodes()
        if node.op_type == "Constant"
    }
    names = sorted({*inline, *values})
    if not names:
        return False
    draft.target = draft.chance.choice(names)
    at = draft.chance.random()
    tensors = [*inline.get(draft.target, ())]
    tensors += [one.t for node in values.get(draft.target, ()) for one in node.attribute if one.name == "value"]
    for tensor in tensors:
        array = numpy_helper.to_array(tensor).copy()
        flat = array.reshape(-1)
        if not flat.size or array.dtype.kind not in "fi":
            return False
        place = int(at * flat.size)
        flat[place] = flat[place] * 1.5 + 0.1 if array.dtype.kind == "f" else flat[place] + 1
        tensor.raw_data = numpy_helper.from_array(array).raw_data
        for kept in ("int64_data", "float_data", "int32_data"):
            tensor.ClearField(kept)
        _hash(tensor)
    return bool(tensors)


def _hash(tensor: TensorProto) -> None:
    for entry in tensor.metadata_props:
        if entry.key == DIGEST:
            entry.value = hashlib.sha256(tensor.raw_data).hexdigest()[: len(entry.value)]


def _exchange(one: TensorProto, two: TensorProto, fields: Sequence[str]) -> None:
    first, second = TensorProto(), TensorProto()
    first.CopyFrom(one)
    second.CopyFrom(two)
    for to, of in ((one, second), (two, first)):
        for name in fields:
            del getattr(to, name)[:]
            getattr(to, name).extend(getattr(of, name))
        to.ClearField("raw_data")
        if of.HasField("raw_data"):
            to.raw_data = of.raw_data
        to.data_location = of.data_location


def weight(draft: Draft) -> bool:
    """Two weights of one shape have each other's numbers, and each says what it is."""
    weights = draft.weights(True)
    by_shape: dict[object, list[str]] = defaultdict(list)
    for name, tensors in weights.items():
        by_shape[tuple(tensors[0].dims)].append(name)
    groups = [sorted(names) for names in by_shape.values() if len(names) > 1]
    if not groups:
        return False
    pair = draft.chance.sample(draft.chance.choice(sorted(groups)), 2)
    draft.target = " and ".join(pair)
    for model in draft.models.values():
        there = {tensor.name: tensor for tensor in model.graph.initializer}
        if all(name in there for name in pair):
            _exchange(there[pair[0]], there[pair[1]], ("external_data", "metadata_props"))
    return True


def box(draft: Draft) -> bool:
    """A weight of the ranks of one file is the shard of the ranks of another."""
    shards: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file, model in draft.files.items():
        for tensor in model.graph.initializer:
            text = next((entry.value for entry in tensor.metadata_props if entry.key == PIECE), "")
            if "[" in text:
                shards[file.partition("rank_")[0], tensor.name].add(text)
    names = sorted({name for (_, name), texts in shards.items() if len(texts) > 1})
    if not names:
        return False
    draft.target = draft.chance.choice(names)
    before = {file: _copy(model, draft.target) for file, model in draft.files.items()}
    done = False
    for file, model in draft.models.items():
        own = before[file]
        others = [
            other
            for there, other in before.items()
            if there.partition("rank_")[0] == file.partition("rank_")[0]
            and other
            and own
            and other.metadata_props[0] != own.metadata_props[0]
            and other.dims == own.dims
        ]
        if others:
            tensor = next(one for one in model.graph.initializer if one.name == draft.target)
            tensor.CopyFrom(others[0])
            done = True
    return done


def _copy(model: ModelProto, name: str) -> TensorProto | None:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            copy = TensorProto()
            copy.CopyFrom(tensor)
            return copy
    return None


def dropped(draft: Draft) -> bool:
    """A collective is left out, in the manifest, too: each value stands for what would be made of it."""
    calls = [node for node in draft.nodes(plain=False) if node.domain == DOMAIN]
    nodes = draft.draw([node for node in calls if node.op_type in ("AllReduce", "Exchange", "AllToAll")])
    if not nodes or any(len(node.input) != len(node.output) for node in nodes):
        return False
    results = {name for node in nodes for name in node.output}
    for model in draft.models.values():
        for nodes_there in (model.graph.node, *(one.node for one in model.functions)):
            for at in reversed(range(len(nodes_there))):
                node = nodes_there[at]
                if node.domain == DOMAIN and node.name == draft.target:
                    pairs = list(zip(node.input, node.output, strict=True))
                    del nodes_there[at]
                    for source, result in pairs:
                        nodes_there.insert(at, helper.make_node("Identity", [source], [result], name=result))
    for name in draft.programs:
        program = draft.manifest["programs"][name]
        program["collectives"] = [one for one in program["collectives"] if one["value"] not in results]
    return True


def group(draft: Draft) -> bool:
    """A collective is of another group of ranks, in the manifest, too."""
    nodes = draft.draw(
        [
            node
            for node in draft.nodes(plain=False)
            if node.domain == DOMAIN and any(one.name == "group" for one in node.attribute)
        ]
    )
    names = sorted(draft.manifest["groups"])
    if not nodes or len(names) < 2:
        return False
    own = next(one for one in nodes[0].attribute if one.name == "group")
    other = draft.chance.choice([name for name in names if name.encode() != own.s])
    values = {name for node in nodes for name in node.output}
    for node in nodes:
        next(one for one in node.attribute if one.name == "group").s = other.encode()
    for name in draft.programs:
        for record in draft.manifest["programs"][name]["collectives"]:
            if record["value"] in values:
                record["group"] = other
    return True


def edge(draft: Draft) -> bool:
    """A node reads another value of the same type and shape, which is there before it."""
    model = draft.models[draft.chance.choice(sorted(draft.models))]
    tasks = [one for one in model.functions if one.domain == "partc.task"]
    body: Any = draft.chance.choice(tasks) if tasks else model.graph
    shapes = {
        port.name: port.type.SerializeToString(deterministic=True)
        for port in (*body.value_info, *model.graph.input, *model.graph.output)
    }
    shapes |= {
        one.name: helper.make_tensor_type_proto(one.data_type, one.dims).SerializeToString(deterministic=True)
        for one in model.graph.initializer
    }
    there, choices = list[str](), list[tuple[str, int, str]]()
    there += [port.name for port in model.graph.input] if not tasks else list(body.input)
    there += [one.name for one in model.graph.initializer]
    for node in body.node:
        for at, name in enumerate(node.input if node.domain != DOMAIN else ()):
            choices += [
                (node.name, at, other)
                for other in there
                if other != name and name in shapes and shapes.get(other) == shapes[name]
            ]
        there += [name for name in node.output if name]
    if not choices:
        return False
    target, at, other = draft.chance.choice(choices)
    draft.target = f"{target} {at}: {other}"
    for node in draft.nodes(target):
        node.input[at] = other
    return True


CLASSES: dict[str, Callable[[Draft], bool]] = {
    "op": op,
    "attribute": attribute,
    "constant": constant,
    "weights swapped": weight,
    "box of a weight": box,
    "collective dropped": dropped,
    "group changed": group,
    "edge redirected": edge,
}
SCOPES = ("one rank", "one program", "everywhere")
WHOLE_PROGRAMS = ("collective dropped", "group changed")
"""What a single rank cannot do by itself without a step that never ends."""


def mutate(source: Path, target: Path, kind: str, scope: str, seed: str) -> str:
    """A copy of an artifact with a mutant; what it changes, or '' where the artifact has nothing of it."""
    manifest = json.loads((source / "manifest.json").read_text())
    chance = random.Random(seed)
    programs = [*manifest["programs"]]
    files = {path.name: onnx.load(path, load_external_data=False) for path in sorted(source.glob("*rank_*.onnx"))}
    chosen, names = files, programs
    if scope == "one rank":
        rank = chance.choice(sorted({file[-9:] for file in files}))
        chosen = {file: model for file, model in files.items() if file.endswith(rank)}
        if len(chosen) == len(files) or kind in WHOLE_PROGRAMS:
            return ""
    elif scope == "one program":
        if len(programs) < 2:
            return ""
        at = chance.randrange(len(programs))
        names = [programs[at]]
        prefix = "" if at == 0 else f"{programs[at]}_"
        chosen = {file: model for file, model in files.items() if file.partition("rank_")[0] == prefix}
    draft = Draft(manifest, files, chosen, chance, names)
    before = {file: model.SerializeToString(deterministic=True) for file, model in files.items()}
    if not CLASSES[kind](draft) or all(
        model.SerializeToString(deterministic=True) == before[file] for file, model in files.items()
    ):
        return ""
    shutil.copytree(source, target)
    for file, model in files.items():
        (target / file).write_bytes(model.SerializeToString(deterministic=True))
    (target / "manifest.json").write_text(json.dumps(manifest))
    correct(target)
    return f"{draft.target} in {', '.join(chosen)}"


def mutants(name: str, source: Path, count: int, seed: int, scratch: Path) -> Iterator[tuple[str, str, str, Path]]:
    """So many mutants of an artifact: class, scope, what it changes, and its folder."""
    pairs = [(kind, scope) for kind in CLASSES for scope in SCOPES]
    made = 0
    for at in range(20 * count):
        kind, scope = pairs[at % len(pairs)]
        target = scratch / "mutant"
        shutil.rmtree(target, ignore_errors=True)
        if what := mutate(source, target, kind, scope, f"{seed} {name} {at}"):
            yield kind, scope, what, target
            made += 1
            if made == count:
                return


def sweep(
    count: int, seed: int, names: Sequence[str]
) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]], list[str]]:
    """Mutants of artifacts, an equal number of each: ends by class and by artifact and scope, and what was missed."""
    by_class: Counter[tuple[str, str]] = Counter()
    by_scope: Counter[tuple[str, str]] = Counter()
    missed = []
    with tempfile.TemporaryDirectory() as text:
        for name in names:
            source = build(name, Path(text) / name)
            assert not (found := check_artifact(source)), found[0]
            wanted = run(source)
            assert not isinstance(wanted, str), wanted
            for kind, scope, what, folder in mutants(name, source, count // len(names), seed, Path(text)):
                refused = check_artifact(folder)
                results = run(folder)
                end = (
                    "harmless"
                    if same(wanted, results)
                    else "refused"
                    if refused
                    else "fails"
                    if isinstance(results, str)
                    else "missed"
                )
                end = "false alarm" if end == "harmless" and refused else end
                by_class[kind, end] += 1
                by_scope[f"{name}, {scope}", end] += 1
                if end in ("missed", "fails"):
                    missed.append(
                        f"{end}: {name}, {kind}, {scope}: {what}" + (f": {results}" if isinstance(results, str) else "")
                    )
    return by_class, by_scope, missed


def table(title: str, ends: Counter[tuple[str, str]]) -> str:
    """The share that is found, by row."""
    rows = [f"{title:28} {'found':>9} {'fails':>6} {'missed':>7} {'harmless':>9}"]
    for name in dict.fromkeys(name for name, _ in ends):
        refused, fails, lost = (ends[name, end] for end in ("refused", "fails", "missed"))
        harmless = ends[name, "harmless"] + ends[name, "false alarm"]
        rows.append(f"{name:28} {refused:4} of {refused + fails + lost:3} {fails:5} {lost:7} {harmless:9}")
    return "\n".join(rows)


def main() -> None:
    """Prints the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=PLANS)
    args = parser.parse_args()
    by_class, by_scope, missed = sweep(args.count, args.seed, [args.only] if args.only else [*PLANS])
    print("\n".join(missed))
    print(table("class", by_class), table("artifact, scope", by_scope), sep="\n\n")
    refused, lost = (
        sum(number for (_, one), number in by_class.items() if one == end) for end in ("refused", "missed")
    )
    print(
        f"\n{refused} of {refused + lost} mutants that give other numbers refused ({100 * refused / max(refused + lost, 1):.0f} %)"
    )


if __name__ == "__main__":
    main()
