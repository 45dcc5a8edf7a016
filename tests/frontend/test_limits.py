"""What plans and manifests may have is bounded before anything is allocated for it, and told as any other mistake."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from artifact_edit import chain
from onnx import helper
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.artifact.format import MOST_RANKS
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import ArtifactError

SECONDS = 5
HUGE = 10**12
NESTED = "[" * 200 + "1" + "]" * 200


@pytest.mark.parametrize(
    ("plan", "fact"),
    [
        (f"ranks: {HUGE}", f"p.yaml:1: 'ranks': expected at most {MOST_RANKS}, but got {HUGE}"),
        (f"ranks: {10**40}", "p.yaml:1: the number 10000000000000000000... of 41 digits"),
        (f"ranks: 2\nmesh: {{dp: {HUGE}}}", f"the mesh dp={HUGE} has {HUGE} ranks, but there are 2 ranks"),
        (f"ranks: 2\nplacement: {{a: [{'1,' * 8_000}]}}", "rank 1 is in the list twice"),
        (f"ranks: 2\nplacement: {{a: {HUGE}}}", f"rank {HUGE}, but there are 2 ranks"),
        (f"ranks: 2\nsymbols: {{b: {{divisor: {10**13}}}}}", "the 'divisor' value should be at most 1099511627776"),
        (f"ranks: 2\ninputs: {{x: [{10**13}]}}", f"dim 0: the size {10**13} is above 1099511627776"),
        (f"ranks: 2\n? {'a' * 20_000}\n: 1", "p.yaml:2: a key of 20,000 characters"),
        (f"ranks: 2\noutputs: {'a' * 20_000}", "p.yaml:2: a string of 20,000 characters"),
        (f"ranks: 2\nplacement: {{a: {NESTED}}}", "p.yaml:2: lists and mappings are nested too deeply"),
        (f"ranks: 2\nplacement: {{a: {NESTED * 20}}}", "lists and mappings are nested too deeply to be read"),
        (f"ranks: 2\nplacement: [{'a,' * 300_000}]", "p.yaml:1: the plan has more than 100,000 entries"),
    ],
)
def test_plans(plan: str, fact: str) -> None:
    if NESTED * 20 in plan:
        plan = plan.replace(NESTED * 20, "[" * 1_000)
    begin = time.process_time()
    with pytest.raises(CompileError) as caught:
        parse_plan(plan, "p.yaml")
    assert fact in str(caught.value)
    assert len(str(caught.value)) < 500
    assert time.process_time() - begin < SECONDS


def deep(manifest: dict[str, object]) -> None:
    inner: object = 1
    for _ in range(500):
        inner = [inner]
    manifest["symbols"] = inner


def set_to(key: str, value: object) -> Callable[[dict[str, object]], None]:
    def change(manifest: dict[str, object]) -> None:
        manifest[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (set_to("ranks", HUGE), "ranks: Input should be less than or equal to 65536"),
        (set_to("ranks", 60_000), "it lists no file rank_0003.onnx for rank 3 of 60000"),
        (set_to("ranks", 10**30), "a number of 31 digits"),
        (set_to("groups", {"g": [list(range(100_000))]}), "disjoint lists of ranks 0 to 2 are needed"),
        (
            set_to("groups", {"g": ["0-65535"] * 12_000}),
            "its groups list 786,432,000 ranks; at most 4,194,304 are read",
        ),
        (set_to("groups", {f"g{k}": ["0-65535"] for k in range(3000)}), "its groups list 196,608,000 ranks"),
        (
            set_to("groups", {"g": [f"{k}-65535" for k in range(3000)]}),
            "groups.g.64: Value error, with this the file lists more than 4,194,304",
        ),
        (set_to("symbols", {"b": {"divisor": 10**20}}), "a number of 21 digits"),
        (deep, "symbols: Input should be a valid dictionary"),
    ],
)
def test_manifests(tmp_path: Path, change: Callable[[dict[str, object]], None], fact: str) -> None:
    folder = chain(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    begin = time.process_time()
    with pytest.raises(ArtifactError) as caught:
        load_local(folder)
    assert fact in str(caught.value)
    assert len(str(caught.value)) < 4000
    assert check_artifact(folder) != []
    assert time.process_time() - begin < SECONDS


def calls(depth: int, opset: int) -> bytes:
    """A model whose functions call the next twice."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    functions = []
    for k in range(depth):
        one = (
            helper.make_node("Relu", ["a"], ["v"])
            if k == depth - 1
            else helper.make_node(f"D{k + 1}", ["a"], ["v"], domain="own")
        )
        two = (
            helper.make_node("Relu", ["v"], ["c"])
            if k == depth - 1
            else helper.make_node(f"D{k + 1}", ["v"], ["c"], domain="own")
        )
        inner = [helper.make_opsetid("", opset), opsets[1]]
        functions.append(helper.make_function("own", f"D{k}", ["a"], ["c"], [one, two], inner))
    ports = [helper.make_tensor_value_info(name, 1, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("D0", ["x"], ["y"], domain="own")], "g", ports[:1], ports[1:])
    made = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)
    return bytes(made.SerializeToString())


@pytest.mark.parametrize("opset", [21, 18])
def test_models(tmp_path: Path, opset: int) -> None:
    """2 KB of functions that would become 2^31 nodes."""
    path = tmp_path / "grow.onnx"
    path.write_bytes(calls(30, opset))
    begin = time.process_time()
    with pytest.raises(CompileError, match="it has 2,147,483,647 nodes with its functions written out"):
        load(path)
    assert time.process_time() - begin < SECONDS
    path.write_bytes(calls(3, 21))
    assert len(list(load(path).model.graph)) == 8


def test_a_chain_of_functions(tmp_path: Path) -> None:
    """1 MB of functions that each call the next: names of nodes, which tell the calls around them, would take 1 GB."""
    own = helper.make_opsetid("own", 1)
    functions = [
        helper.make_function("own", f"D{k}", ["a"], ["c"], [helper.make_node(op, ["a"], ["c"], domain=domain)], [own])
        for k in range(20_000)
        for op, domain in [(f"D{k + 1}", "own") if k < 19_999 else ("Relu", "")]
    ]
    ports = [helper.make_tensor_value_info(name, 1, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("D0", ["x"], ["y"], domain="own")], "g", ports[:1], ports[1:])
    path = tmp_path / "chain.onnx"
    opsets = [helper.make_opsetid("", 21), own]
    onnx.save(helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10), path)
    begin = time.process_time()
    with pytest.raises(CompileError, match="its functions call each other 20,000 deep; at most 100 are read"):
        load(path)
    assert time.process_time() - begin < SECONDS
