"""Tokens in folded order: equal results and gradients, even work, positions, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from context_case import DEPTH, INT64, LENGTH, TRAIN, WIDTH, Layer, Windowed, decoder, feeds, received, units
from machines import links
from partc.compiler import nn
from partc.compiler.cost.step import simulated
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.lower import ring
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.rewrite.fold import in_folded_order
from partc.runtime.artifact.format import FACTORS, HOP, ORDER, PHASE
from partc.runtime.artifact.graph.onnx_graph import metadata_of
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.folded import chunks
from partc.runtime.checker.across.orders import check_orders
from partc.runtime.checker.across.rings import check_rings, rank_records
from partc.runtime.checker.subject import Subject
from partc.runtime.errors import Violation
from rows import of_today
from training_equivalence import same_training


def plan(ranks: int, attention: str, divisor: int = 24) -> str:
    return (
        f"ranks: {ranks}\nmesh: {{cp: {ranks}}}\ncontext: {{axis: cp, attention: {attention}, order: fold}}\n"
        f"symbols: {{batch: {{divisor: 2}}, seq: {{divisor: {divisor}, max: 48}}}}\n{TRAIN}"
    )


@pytest.mark.parametrize(
    ("ranks", "way", "causal"),
    [(3, "ring", True), *of_today([(2, "ring", True), (2, "heads", False), (4, "gather", False)], 1)],
)
def test_folded_tokens_train_as_natural_ones(
    ranks: int, way: str, causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings compute queries in chunks of 4: a rank's half has other chunks than the whole."""
    monkeypatch.setattr(ring, "CHUNK", 4)
    program = same_training(partial(decoder, causal), plan(ranks, way), tmp_path, feeds(causal), rtol=1e-5, atol=1e-5)
    assert received(program) == units(way, ranks, False) * 2 * LENGTH * DEPTH * 4
    if way == "ring":
        records = rank_records(_subject(tmp_path / "cut"))
        for phase in ("", "backward"):
            counts = [
                one.pairs(found, place, ranks).total()
                for place, one in records.items()
                for found in one.hops
                if found[2:] == (phase, "k")
            ]
            assert counts == [2 * ranks + 1] * ranks  # of natural order: 1, 2, ... ranks


def test_ranks_of_a_folded_ring_are_priced_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes are known, and a ring has as many operations in chunks, in a Scan, as without."""
    operations = dict[tuple[str, int], list[float]]()
    for order, chunk in (("fold", 128), ("fold", 4), ("runs", 4)):
        monkeypatch.setattr(ring, "CHUNK", chunk)
        text = plan(2, "ring").replace("order: fold", f"order: {order}")
        compile_source(decoder(True), parse_plan(text, "plan.yaml"), tmp_path / f"{order}{chunk}", check=False)
        artifact = open_artifact(tmp_path / f"{order}{chunk}")
        step = simulated(artifact, links(1e-7, 1e12), {"batch": 2, "seq": LENGTH})
        assert order == "runs" or step.unknown == 0
        operations[order, chunk] = step.operations
    whole, cut, runs = operations.values()
    assert cut == pytest.approx(whole, rel=0.05)  # chunks add their terms of gradients
    assert cut[0] == pytest.approx(cut[1], rel=0.02)
    assert runs[1] > 1.1 * runs[0]


def test_folded_tokens_go_with_a_tensor_axis(tmp_path: Path) -> None:
    styles = 'sharding: {"layers.*.{q,k,v}": colwise, "layers.*.out": rowwise, head: colwise}\n'
    text = plan(2, "ring").replace("ranks: 2", "ranks: 4").replace("{cp: 2}", "{cp: 2, tp: 2}")
    text = text.replace("\ntrain:", f"\n{styles}train:")
    same_training(partial(decoder, True), text, tmp_path, feeds(True), rtol=1e-5, atol=1e-5)


def _subject(folder: Path) -> Subject:
    artifact = open_artifact(folder)
    models = {rank: artifact.model(rank) for rank in range(artifact.manifest.ranks)}
    return Subject(folder, artifact.manifest, lambda name: [], models=models)


class Placed(nn.Module):
    """A layer whose mask is a Trilu, and whose positions are counted from tokens that are kept."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.tokens, self.places, self.late = nn.Embedding(16, WIDTH), nn.Embedding(64, WIDTH), late
        self.layer, self.head = Layer(), nn.Linear(WIDTH, 16)

    def forward(self, op, ids, keep):
        one = op.Constant(value_ints=[1])
        size = op.Shape(ids, start=1, end=2)
        ones = op.ConstantOfShape(op.Concat(size, size, axis=0), value=ir.tensor(np.ones(1, np.int64)))
        visible = op.Cast(op.Trilu(ones, upper=0), to=ir.DataType.BOOL)
        place = op.Sub(op.CumSum(keep, op.Constant(value_int=1)), op.Constant(value_int=1))
        x = op.Add(self.tokens(op, ids), self.places(op, op.Max(place, op.Constant(value_int=0))))
        x = self.layer(op, x, visible)
        return self.head(op, op.CumSum(x, one) if self.late else x)


def placed(late: bool = False) -> Source:
    nn.seed(3)
    inputs = [Spec(name, ("batch", "seq"), INT64) for name in ("ids", "keep")]
    return Source(trace(Placed(late), inputs, ["logits"], "placed.py"))


@pytest.mark.parametrize("way", of_today(["gather", "ring"], 1))
def test_ops_that_know_places_get_the_natural_order(way: str, tmp_path: Path) -> None:
    program = same_training(placed, plan(2, way), tmp_path, feeds(), rtol=1e-5, atol=1e-5)
    rings = [node.attributes.get_int("causal", 0) for node in program.model.graph if node.op_type == "RingAttention"]
    assert rings == [1] * (way == "ring")


REFUSED = [
    (lambda: placed(late=True), "ring", 24, "plan.yaml:3: 'CumSum_1' (CumSum) cannot run on folded tokens\n"
     "  each rank has two runs of tokens, and the op depends on their places, or leads to one that does\n"
     "  help: write order: runs, or leave the op to the program that reads the output"),
    (decoder, "gather", 6, "seq is a multiple of 6, not always of 4; nothing is padded: a rank has two runs of tokens\n"
     "  help: declare `seq: {divisor: 12}` under symbols"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "way", "divisor", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_folded_is_refused(source, way: str, divisor: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as error:
        compile_source(source(), parse_plan(plan(2, way, divisor), "plan.yaml"), tmp_path / "build")
    assert message in str(error.value)


def test_a_window_is_not_folded(tmp_path: Path) -> None:
    source = Source(trace(Windowed(5.0), [Spec("x", ("batch", "seq", 8), ir.DataType.FLOAT)], ["y"], "window.py"))
    text = plan(2, "ring").partition("train:")[0]
    with pytest.raises(CompileError) as error:
        compile_source(source, parse_plan(text, "plan.yaml"), tmp_path / "build")
    assert str(error.value) == (
        "plan.yaml:3: the attention of 'MatMul_1' has a window of tokens\n"
        "  in folded order a rank's neighbours are on other ranks: a window would send more, and its work is even in runs\n"
        "  help: write order: runs"
    )


def test_the_order_is_one_of_chunks() -> None:
    assert chunks(3) == [0, 5, 1, 4, 2, 3]
    assert in_folded_order(np.arange(8), 2, [0]).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("order", of_today(["runs", "fold"], 1))
def test_data_parallel_inputs_shard_no_records_over_the_axis_of_tokens(order: str, tmp_path: Path) -> None:
    """A batch of odd size, and an input of records without tokens."""
    text = plan(2, "gather").replace("batch: {divisor: 2}", "batch: {min: 1}").replace("order: fold", f"order: {order}")
    chance = np.random.default_rng(2)
    ids, labels = chance.integers(0, 16, (2, 3, LENGTH))
    given = {"ids": ids, "labels": labels, "factor": chance.standard_normal(3).astype(np.float32)}
    same_training(scaled, f"{text}dataset: data_parallel\n", tmp_path, [given], rtol=1e-5, atol=1e-5)


class Scaled(nn.Module):
    """A layer whose result each record scales."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer, self.head = nn.Embedding(16, WIDTH), Layer(), nn.Linear(WIDTH, 16)

    def forward(self, op, ids, factor):
        places = op.Range(0, op.Squeeze(op.Shape(ids, start=1, end=2)), 1)
        x = self.layer(op, self.tokens(op, ids), op.LessOrEqual(places, op.Unsqueeze(places, [1])))
        return self.head(op, op.Mul(x, op.Unsqueeze(factor, [1, 2])))


def scaled() -> Source:
    nn.seed(3)
    inputs = [Spec("ids", ("batch", "seq"), INT64), Spec("factor", ("batch",), ir.DataType.FLOAT)]
    return Source(trace(Scaled(), inputs, ["logits"], "scaled.py"))


# planted faults


def _labelled(model: onnx.ModelProto, phase: str) -> dict[str, list[onnx.NodeProto]]:
    """Maps the labels of a ring's nodes in a phase to these nodes."""
    found = dict[str, list[onnx.NodeProto]]()
    for node in model.graph.node:
        if metadata_of(node, HOP).partition(" ")[2] and metadata_of(node, PHASE) == phase:
            found.setdefault(metadata_of(node, HOP), []).append(node)
    return found


def _read_instead(model: onnx.ModelProto, old: str, new: str) -> None:
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            if name == old:
                node.input[k] = new


def _set(node: onnx.NodeProto, key: str, text: str) -> None:
    next(entry for entry in node.metadata_props if entry.key == key).value = text


def _faults_of_rings(model: onnx.ModelProto) -> Iterator[tuple[str, Callable[[onnx.ModelProto], None]]]:
    """Yields faults of a rank's hops, each with its name."""

    def at(
        phase: str, label: str, change: Callable[[onnx.ModelProto, onnx.NodeProto], None]
    ) -> Callable[[onnx.ModelProto], None]:
        def changed(other: onnx.ModelProto) -> None:
            for node in _labelled(other, phase)[label]:
                change(other, node)

        return changed

    def block(source: str) -> Callable[[onnx.ModelProto, onnx.NodeProto], None]:
        return lambda other, node: node.input.__setitem__(0, source)

    def other_half(other: onnx.ModelProto, node: onnx.NodeProto) -> None:
        """Slices `0:middle` instead of `middle:end`, and the reverse."""
        makers = {name: one for one in other.graph.node for name in one.output}
        if (middle := makers.get(node.input[1])) is not None:
            node.input[1], node.input[2] = middle.input[1], node.input[1]
        else:
            node.input[1], node.input[2] = node.input[2], makers[node.input[2]].input[0]

    for phase in ("", "backward"):
        labels = _labelled(model, phase)
        for operand, (one, two) in itertools.product("kv", itertools.combinations(range(3), 2)):
            first, second = (labels[f"{operand} {hop} fold"][0].input[0] for hop in (one, two))
            yield (
                f"{phase} {operand}: hop {two} reads the block of {one}",
                at(phase, f"{operand} {two} fold", block(first)),
            )
            yield (
                f"{phase} {operand}: hop {one} reads the block of {two}",
                at(phase, f"{operand} {one} fold", block(second)),
            )
        for label in labels:
            if label.endswith("half"):
                yield f"{phase} {label}: the other half", at(phase, label, other_half)
                yield (
                    f"{phase} {label}: both halves",
                    at(phase, label, lambda other, node: _read_instead(other, node.output[0], node.input[0])),
                )
            else:
                yield f"{phase} {label}: not computed", at(phase, label, lambda _, node: _set(node, HOP, "-"))


def _faults_of_orders(model: onnx.ModelProto) -> Iterator[tuple[str, Callable[[onnx.ModelProto], None]]]:
    """Yields faults of the order of tokens, each with its name."""
    nodes = {node.output[0]: node for node in model.graph.node if node.output}
    ordered = [name for name, node in nodes.items() if metadata_of(node, ORDER)]

    def at(name: str, change: Callable[[onnx.ModelProto, onnx.NodeProto], None]) -> Callable[[onnx.ModelProto], None]:
        return lambda other: change(other, next(node for node in other.graph.node if name in node.output))

    for name in ordered:
        yield (
            f"{name}: read in natural order",
            at(name, lambda other, node: _read_instead(other, node.output[0], node.input[0])),
        )
        yield (
            f"{name}: back",
            at(name, lambda _, node: _set(node, ORDER, metadata_of(node, ORDER).replace("fold", "back"))),
        )
        yield f"{name}: of other ranks", at(name, lambda _, node: _set(node, ORDER, "fold 4"))

    def unaware(_: onnx.ModelProto, node: onnx.NodeProto) -> None:
        node.op_type = "CumSum"
        _set(node, FACTORS, "a..,.->a..")

    yield "CumSum of tokens", at("tokens.Gather", lambda other, node: unaware(other, _reader(other, node.output[0])))

    def table(other: onnx.ModelProto) -> None:
        for k, tensor in enumerate(other.graph.initializer):
            if tensor.name.endswith("fold.table"):
                array = onnx.numpy_helper.to_array(tensor)
                other.graph.initializer[k].CopyFrom(onnx.numpy_helper.from_array(np.sort(array), tensor.name))

    yield "the table of the natural order", table


def _reader(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(
        node
        for node in model.graph.node
        if name in node.input and node.op_type == "MatMul" and not metadata_of(node, PHASE)
    )


def test_planted_faults_of_rings_and_orders_are_told(tmp_path: Path) -> None:
    compile_source(decoder(True), parse_plan(plan(3, "ring"), "plan.yaml"), tmp_path / "build", check=False)
    subject, missed, count = _subject(tmp_path / "build"), list[str](), 0

    def told(rank: int, changed: onnx.ModelProto, law: Callable[[Subject], Iterable[Violation]]) -> list[Violation]:
        return [*law(replace(subject, models={**subject.models, rank: changed}))]

    def orders(one: Subject) -> Iterable[Violation]:
        return check_orders(one.manifest, {0: one.models[0]})

    cases = (1, _faults_of_rings, check_rings), (0, _faults_of_orders, orders)
    for rank, faults, law in cases:
        assert told(rank, subject.models[rank], law) == []
        for name, change in faults(subject.models[rank]):
            changed = onnx.ModelProto()
            changed.CopyFrom(subject.models[rank])
            change(changed)
            count += 1
            missed += [] if told(rank, changed, law) else [f"rank {rank}: {name}"]
    assert missed == []
    assert count > 50
