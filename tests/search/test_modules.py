"""Over tp each module has the fastest way: Megatron's for a transformer, records before what is sharded; and both equal the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import same_as_whole
from machines import curve, machine
from onnx import TensorProto, helper
from partc.cli.main import invoke
from partc.compiler.cost.machine import Machine
from partc.compiler.proposal.propose import Degrees
from partc.compiler.search.base_plan import Base, base_of
from partc.compiler.search.blocks import Placing
from partc.compiler.search.candidate import Candidate, Fixed
from partc.compiler.search.search import Request, Search
from proposal_case import Graph, ids, source, transformer

TRAIN = """ranks: 1
train:
  loss: {type: mse, prediction: fc2.Add.out, target: label}
  optimizer: {type: sgd, lr: 0.01}
  batch: 16
"""


def links(latency: float, speed: float) -> Machine:
    one = machine()
    link = replace(one.links[0], send=curve(speed, latency), all_reduce=curve(speed, 2 * latency))
    return replace(one, links=[link])


def convolutions() -> onnx.ModelProto:
    """Convolutions that compute much and have few weights, and layers of which it is the other way round."""
    g, x = Graph(), "x"
    for k, channels in enumerate((3, 12)):
        made = g.node(f"conv{k}.Conv", "Conv", x, g.weight(f"conv{k}.weight", 12, channels, 3, 3), pads=[1, 1, 1, 1])
        x = g.node(f"conv{k}.act", "Relu", made)
    x = g.node("fc1.act", "Relu", g.linear("fc1", g.node("flatten", "Flatten", x), 12 * 64, 768))
    out = g.linear("fc2", x, 768, 6)
    dims = (("x", ["batch", 3, 8, 8]), (out, ["batch", 6]))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in dims]
    graph = helper.make_graph(g.nodes, "g", ports[:1], ports[1:], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def search(
    proto: onnx.ModelProto, on: Machine, sizes: dict[str, int], base: Base | None = None, ranks: int = 4
) -> Search:
    return Search.of(source(proto), "model.onnx", Request(ranks, Fixed(), base or Base(), on, sizes))


def test_a_transformer_on_fast_links_is_sharded_as_megatron_does() -> None:
    """Each attention and perceptron by its heads and hidden units, with two AllReduces a layer; and each line says what it saves."""
    found = search(transformer(2), links(1e-9, 1e12), {"batch": 1, "seq": 5})
    modules = found.modules(Degrees(tp=2))
    assert set(modules.ways[2:]) == {Placing.SHARDED}, "all behind the table of words"
    proposal = found.proposal(Candidate(Degrees(tp=2)))
    assert '"layers.*.up": colwise' in proposal.text
    assert '"layers.*.down": rowwise' in proposal.text
    assert "; saves about" in proposal.text
    assert sum(event.op_type == "AllReduce" for event in proposal.done.events) == 2 * 2 + 1
    same_as_whole(transformer(2), proposal.text, ids(6, 5), rtol=1e-4, atol=1e-5)


def test_perceptrons_on_fast_links_have_megatrons_cut() -> None:
    """Columns of the first layer, then rows of the second, and one sum behind it; the plan equals the model.

    The odd records cannot be divided, and what is saved of them is more than the session that the sum ends.
    """
    g = Graph()
    hidden = g.node("act", "Gelu", g.linear("up", "x", 10, 42))
    out = g.linear("down", hidden, 42, 10)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 10]) for name in ("x", out)]
    graph = helper.make_graph(g.nodes, "g", ports[:1], ports[1:], g.weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found = search(proto, links(1e-9, 1e12), {"batch": 63}, ranks=2)
    best = min(found.candidates, key=lambda one: found.estimate(one).seconds)
    assert best.degrees == Degrees(tp=2)
    proposal = found.proposal(best)
    assert "up: colwise" in proposal.text
    assert "down: rowwise" in proposal.text
    assert [event.op_type for event in proposal.done.events] == ["AllReduce"]
    given = {"x": np.random.default_rng(3).standard_normal((5, 10), np.float32)}
    same_as_whole(proto, proposal.text, given, rtol=1e-5, atol=1e-5)


def test_on_slow_links_no_module_is_sharded() -> None:
    found = search(transformer(2), links(1.0, 1e6), {"batch": 6, "seq": 5})
    assert Placing.SHARDED not in found.modules(Degrees(tp=2)).ways


def test_less_memory_shards_more() -> None:
    """On slow links nothing is sharded, unless the weights do not fit: then as much as must be."""
    found = search(transformer(2), links(1.0, 1e6), {"batch": 1, "seq": 5})
    chain = found.modules(Degrees(tp=2)).chain
    whole, least = chain.cost(found.modules(Degrees(tp=2)).ways)[1], sum(float(one.min()) for one in chain.memory)
    limit = int((whole + least) / 2)
    less = Search.of(
        source(transformer(2)), "model.onnx", replace(found.request, memory=limit, sizes={"batch": 1, "seq": 5})
    ).modules(Degrees(tp=2))
    assert less.chain.cost(less.ways)[1] <= limit
    assert 0 < less.ways.count(Placing.SHARDED) < len(less.ways) - 1


def test_records_before_what_is_sharded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Convolutions have records on all ranks, their weights are few; layers with many weights are sharded, and gather them."""
    (tmp_path / "train.yaml").write_text(TRAIN)
    base, _ = base_of(tmp_path / "train.yaml", source(convolutions()))
    found = search(convolutions(), links(1e-6, 1e8), {"batch": 16}, base)
    modules = found.modules(Degrees(tp=4))
    assert modules.has_records
    assert modules.ways[-1] is Placing.SHARDED
    one = Candidate(Degrees(tp=4), by_module=True)
    assert found.estimate(one).seconds < found.estimate(replace(one, by_module=False)).seconds
    proposal = found.proposal(one)
    assert "x: [tp, null, null, null]" in proposal.text
    assert "fc1: colwise" in proposal.text
    assert [event.op_type for event in proposal.done.events].count("AllGather") == 1
    onnx.save(convolutions(), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(proposal.text)
    assert invoke(["verify", str(tmp_path / "model.onnx"), "--plan", str(tmp_path / "plan.yaml")]) == 0
    assert "equal to the unsharded model's" in capsys.readouterr().out
    same = {"x": np.zeros((4, 3, 8, 8), np.float32)}
    inference = search(convolutions(), links(1e-6, 1e8), {"batch": 16}).proposal(one).text
    same_as_whole(convolutions(), inference, same, rtol=1e-4, atol=1e-5)
