"""The standard's multi-device annotations: what is written is read again as the same programs, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import onnx.compose
import onnx.utils
import onnx_ir as ir
import pytest
from annotations_case import compiled, programs, written
from conftest import Golden
from equivalence import whole_outputs
from google.protobuf.text_format import MessageToString
from linear_chains import STYLES, parallel_block
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from partc.compiler.pipeline import compile_model
from partc.runtime import load_local
from sharded_models import BLOCK_STYLES, block, mlp, with_weights

RANDOM = np.random.default_rng(5)
MATMUL = """<ir_version: 11, opset_import: ["" : 21]>
main (float[batch, 12] x) => (float[batch, 6] y) { [up] h = MatMul(x, w)  [act] y = Relu(h) }"""
DUPLICATE = """<ir_version: 10, opset_import: ["" : 21]>
main (float[6, 6] x) => (float[6, 6] y) { [square] y = MatMul(x, x) }"""
CONSTANTS = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 12] x) => (float[batch, 3, 4] y, float[12, 5] z) <int64[1] tail = {-1}> {
    [shape] s = Shape <end = 1> (x)
    [tail_shape] t = Concat <axis = 0> (s, fours)
    [double] w2 = Add(w, w)
    [up] h = MatMul(x, w2)
    [split] y = Reshape(h, t)
    [show] z = Slice(w2, zero, five, one)
}"""


def placed() -> str:
    return "ranks: 5\nplacement: {up: 3, act: [4], down: [2, 1]}\nsharding: {down: rowwise}\noutputs: {y: [0, 4]}\n"


STRATEGIES = """ranks: 8
symbols: {batch: {divisor: 8, max: 64}}
sharding:
  up: {in: [[2, 3], [3, 1]], out: OUT}
  act: {in: [[4, 1]]}
  down: {in: [[1, 8], [8, 1]]}
"""
CASES: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "whole": (mlp, "ranks: 1\n"),
    "styles": (mlp, "ranks: 3\nsharding: {up: colwise, down: rowwise}\n"),
    "block": (block, f"ranks: 4\nsharding: {{{BLOCK_STYLES}}}\n"),
    "mesh": (
        block,
        f"ranks: 6\nmesh: {{dp: 2, tp: 3}}\nsymbols: {{batch: {{divisor: 2}}}}\ndataset: data_parallel\n"
        f"sharding: {{{BLOCK_STYLES}}}\noutputs: {{y: cut}}\n",
    ),
    "placed": (mlp, placed()),
    "out of order": (mlp, "ranks: 6\nplacement: {'**': [5, 0, 2, 1, 4, 3]}\nsharding: {up: {in: [[1, 2], [2, 3]]}}\n"),
    "reduce_scatter": (mlp, STRATEGIES.replace("[2, 3], [3, 1]", "[2, 2], [2, 1]").replace("OUT", "[[8, 1]]")),
    "reduced at once": (mlp, STRATEGIES.replace("[2, 3], [3, 1]", "[2, 2], [2, 1]").replace("OUT", "[[2, 1]]")),
    "sums that pass": (
        parallel_block,
        f"ranks: 4\nmesh: {{dp: 2, tp: 2}}\nsymbols: {{batch: {{divisor: 2}}}}\ndataset: data_parallel\nsharding: {{{STYLES}}}\n",
    ),
    "sums that could pass, and are reduced at once": (
        parallel_block,
        f"ranks: 2\nsharding: {{{STYLES}, res1: {{out: [[1, 1, 1]]}}}}\n",
    ),
    "one value in two layouts": (
        lambda: onnx.parser.parse_model(DUPLICATE),
        "ranks: 6\nsharding: {square: {in: [[3, 2], [2, 1]]}}\n",
    ),
    "kept otherwise than read": (
        mlp,
        "ranks: 6\nsymbols: {batch: {divisor: 6}}\nsharding:\n  up: {in: [[6, 1], null], parameters: {up_w: [2, 3]}}\n",
    ),
    "two meshes": (
        mlp,
        "ranks: 6\nsymbols: {batch: {divisor: 6}}\nsharding:\n  act: {in: [[2, 3]]}\n  down_bias: {in: [[3, 2], [2]]}\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_written_and_read_again_it_is_the_same_program(case: str) -> None:
    model, plan = CASES[case]
    first = compiled(model(), plan)
    proto = written(first)
    second = compiled(proto, None)
    assert programs(second) == programs(first)
    assert written(second).SerializeToString(deterministic=True) == proto.SerializeToString(deterministic=True)


def test_nodes_that_run_where_they_are_read_do_so_again() -> None:
    proto = with_weights(CONSTANTS, {"w": (12, 12)})
    for name, value in {"fours": [3, 4], "zero": [0], "five": [5], "one": [1]}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.int64), name))
    proto.graph.node[5].input[3] = "one"
    plan = """ranks: 6
symbols: {batch: {divisor: 2}}
placement: {up: [0, 1, 2, 3], split: 4, show: 5}
sharding: {up: {in: [[2, 1], [1, 2]]}}
"""
    first = compiled(proto, plan)
    assert any(len(placed.groups) > 1 for placed in first.placement.values())
    assert programs(compiled(written(first), None)) == programs(first)


def test_eight_devices_golden(golden: Golden) -> None:
    text = """<ir_version: 11, opset_import: ["" : 21]>
    main (float[S, 784] x) => (float[S, 512] y) { [matmul1] y = MatMul(x, w) }"""
    plan = "ranks: 8\nsymbols: {S: {divisor: 8}}\nsharding: {matmul1: {in: [[2, 4], [4, 1]]}}\n"
    proto = written(compiled(with_weights(text, {"w": (784, 512)}), plan))
    told = (MessageToString(one) for one in (*proto.configuration, *proto.metadata_props, *proto.graph.node))
    golden("annotated_matmul.txt", "\n".join(told))


def annotate(
    text: str = MATMUL, devices: int = 4, name: str = "tp"
) -> tuple[ir.Model, ir.Node, ir.Node, ir.ModelConfiguration]:
    model = ir.from_proto(with_weights(text, {"w": (12, 6)}))
    up, act = model.graph
    return model, up, act, model.add_device_configuration(name, num_devices=devices)


def same_as_whole_file(model: ir.Model, folder: Path, sizes: tuple[int, ...], plan: str | None = None) -> Complete:
    path = folder / "model.onnx"
    ir.save(model, path)
    if plan is not None:
        (folder / "plan.yaml").write_text(plan)
    report = compile_model(path, folder / "plan.yaml" if plan is not None else None, folder / "build")
    with load_local(folder / "build") as ranks:
        for size in sizes:
            inputs = {"x": RANDOM.standard_normal((size, 12), dtype=np.float32)}
            for output, value in whole_outputs(onnx.load(path), inputs).items():
                np.testing.assert_allclose(ranks(inputs)[output], value, rtol=1e-5, atol=1e-6)
    return report.program


def kinds(program: Complete) -> list[str]:
    return [event.op_type for event in program.events]


def test_onnx_irs_own_api_compiles_without_a_plan(tmp_path: Path) -> None:
    model, up, act, tp = annotate(devices=6)
    x, w = up.inputs
    assert x is not None
    assert w is not None
    up.shard(x, configuration=tp, axis=-1, num_shards=3)
    up.shard(w, configuration=tp, axis=0, num_shards=3)
    up.shard(w, configuration=tp, axis=1, num_shards=2, device_indices=range(6))
    act.shard(act.inputs[0], configuration=tp, axis=0, num_shards=2)
    program = same_as_whole_file(model, tmp_path, (2, 6))
    assert program.plan.ranks == 6
    assert "AllReduce" in kinds(program) or "ReduceScatter" in kinds(program)
    assert program.symbols["batch"].facts.divisor == 2, "the annotation promises what it cuts"


def test_stages_and_lone_devices_are_placement(tmp_path: Path) -> None:
    model, up, act, pp = annotate(devices=3, name="pp")
    up.set_pipeline_stage(pp, 2)
    act.device_configurations = (ir.NodeDeviceConfiguration(pp, (ir.ShardingSpec(act.outputs[0], (1,)),)),)
    program = same_as_whole_file(model, tmp_path, (1, 5))
    assert {program.paths[node]: placed.ranks for node, placed in program.placement.items()} == {
        "up": (2,),
        "act": (1,),
    }


def test_a_stage_is_where_its_other_nodes_are(tmp_path: Path) -> None:
    model, up, act, pp = annotate(devices=5, name="pp")
    up.shard(up.inputs[1], configuration=pp, axis=1, num_shards=2, device_indices=(3, 4), pipeline_stage=1)
    act.set_pipeline_stage(pp, 1)
    program = same_as_whole_file(model, tmp_path, (3,))
    assert {placed.ranks for placed in program.placement.values()} == {(3, 4)}


def test_an_output_that_is_spread_otherwise_is_resharded_where_it_is_made(tmp_path: Path) -> None:
    model, up, _, tp = annotate(devices=2)
    up.shard(up.inputs[1], configuration=tp, axis=0, num_shards=2, device_indices=(0, 1))
    up.shard(up.inputs[0], configuration=tp, axis=1, num_shards=2, device_indices=(0, 1))
    up.shard(up.outputs[0], configuration=tp, axis=1, num_shards=2, device_indices=(0, 1))
    assert kinds(same_as_whole_file(model, tmp_path, (3,)))[0] == "ReduceScatter"


def test_the_plan_wins(tmp_path: Path) -> None:
    model, up, act, tp = annotate(devices=2)
    up.shard(up.inputs[1], configuration=tp, axis=0, num_shards=2, device_indices=(0, 1))
    act.set_pipeline_stage(tp, 1)
    program = same_as_whole_file(model, tmp_path, (3,), "ranks: 2\nplacement: {act: 0}\nsharding: {up: colwise}\n")
    assert "AllReduce" not in kinds(program)
    assert program.placement[next(node for node in program.paths if node.name == "act")].ranks == (0,)


def test_several_configurations(tmp_path: Path) -> None:
    model, up, act, _ = annotate(devices=2, name="first")
    second = model.add_device_configuration("second", num_devices=3)
    act.set_pipeline_stage(second, 2)
    up.shard(up.inputs[1], configuration=second, axis=1, num_shards=3)
    proto = ir.to_proto(model)
    first = compiled(proto, None)
    assert first.plan.ranks == 2
    assert any("first is compiled" in warning for warning in first.warnings)
    assert compiled(proto, None, configuration="second").plan.ranks == 3
    assert compiled(proto, None, configuration="none").plan.ranks == 1
    with pytest.raises(CompileError, match="declares no device configuration 'secnd'") as caught:
        compiled(proto, None, configuration="secnd")
    assert "help: choose 'second'" in str(caught.value)


def test_everything_that_is_wrong_is_named_at_once() -> None:
    model, up, act, tp = annotate(devices=4)
    x, w = up.inputs

    def spec(
        value: ir.Value | None, axes: dict[int, int], device: tuple[int, ...] = (), **groups: tuple[int, ...]
    ) -> ir.ShardingSpec:
        dims = tuple(ir.ShardedDim(axis, (ir.SimpleShardedDim(num_shards=count),)) for axis, count in axes.items())
        entries = tuple(ir.IndexToDeviceGroupMapEntry(-int(key[1:]), ranks) for key, ranks in groups.items())
        return ir.ShardingSpec(value, device, entries, dims)

    ghost = ir.ModelConfiguration("ghost", 2)
    up.device_configurations = (
        ir.NodeDeviceConfiguration(
            tp,
            (spec(x, {9: 2}), spec(w, {0: 5}), spec(ir.Value(name="p_h"), {0: 2}), spec(up.outputs[0], {0: 2}, (0, 7))),
        ),
        ir.NodeDeviceConfiguration(ghost, (spec(x, {0: 2}),)),
    )
    act.device_configurations = (
        ir.NodeDeviceConfiguration(
            tp, (spec(act.inputs[0], {0: 2}, (-1, -2), g1=(0, 1, 2), g2=(3,)), spec(act.outputs[0], {0: 2}, (0, 1, 2)))
        ),
    )
    with pytest.raises(CompileError) as caught:
        compiled(ir.to_proto(model), None)
    text = str(caught.value)
    for fact in [
        "m.onnx: 'up' is annotated for the configuration 'ghost', which the model does not declare",
        "m.onnx:up: 'x': axis 9 is sharded, but it has 2 dims",
        "m.onnx:up: 'w': axis 0 of 12 is sharded into 5 unequal shards",
        "m.onnx:up: the annotation's tensor 'p_h' is not an input or output of the node",
        "m.onnx:up: 'h': device 7 is not there, the configuration has 4",
        "m.onnx:act: 'h': its shards are on groups of unequal sizes: 3, 1",
        "m.onnx:act: 'y': 2 shards (axis 0 in 2), but 3 devices or groups of devices",
    ]:
        assert fact in text
    assert len(caught.value.problems) == 7


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"x": {0: 2}, "w": {1: 2}}, "the same ranks shard dims of MatMul that do not correspond"),
        ({"x": {1: 2}, "w": {1: 2}}, "'w' dim 0 is sharded into 1, but 'x' dim 1, which corresponds to it, into 2"),
    ],
)
def test_cuts_that_no_node_can_have(change: dict[str, dict[int, int]], fact: str) -> None:
    model, up, _, tp = annotate(devices=2)
    for value in up.inputs:
        assert value is not None
        for axis, count in change[value.name or ""].items():
            up.shard(value, configuration=tp, axis=axis, num_shards=count, device_indices=(0, 1))
    with pytest.raises(CompileError) as caught:
        compiled(ir.to_proto(model), None)
    assert fact in str(caught.value)


def test_damage_by_other_tools_is_named(tmp_path: Path) -> None:
    proto = written(compiled(mlp(), "ranks: 2\nsharding: {up: colwise, down: rowwise}\n"))
    onnx.save(proto, tmp_path / "whole.onnx")
    onnx.utils.extract_model(str(tmp_path / "whole.onnx"), str(tmp_path / "part.onnx"), ["x"], ["a"])
    with pytest.raises(CompileError) as caught:
        compiled(onnx.load(tmp_path / "part.onnx"), None)
    assert "3 nodes ('up', 'up_bias', 'act') are annotated for the configuration 'partc'" in str(caught.value)
    with pytest.raises(CompileError) as caught:
        compiled(onnx.compose.add_prefix(proto, "p_"), None)
    assert "the annotation's tensor 'up_w' is not an input or output of the node" in str(caught.value)
    assert "the nearest is 'p_up_w'" in str(caught.value)
    assert compiled(onnx.load(tmp_path / "part.onnx"), None, configuration="none").plan.ranks == 1


def test_a_symbol_that_is_cut_is_promised_by_the_annotation_or_by_the_plan() -> None:
    model, up, _, tp = annotate(devices=3)
    up.shard(up.outputs[0], configuration=tp, axis=0, num_shards=3)
    proto = ir.to_proto(model)
    assert str(compiled(proto, None).symbols["batch"].facts) == "[3,inf]|3N"
    with pytest.raises(CompileError, match=r"m\.onnx:up: .* cannot cut 'x' dim 0 \(batch\) into 3"):
        compiled(proto, "ranks: 3\n")
    assert str(compiled(proto, "ranks: 3\nsymbols: {batch: {divisor: 6}}\n").symbols["batch"].facts) == "[6,inf]|6N"


def test_annotations_inside_of_bodies_are_warned_of() -> None:
    text = """<ir_version: 11, opset_import: ["" : 21]>
    main (float[batch, 12] x, bool c) => (float[batch, 12] y) {
        [if] y = If (c) <
            then_branch = t () => (float[batch, 12] a) { [inner] a = Relu(x) },
            else_branch = e () => (float[batch, 12] b) { b = Neg(x) }>
    }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    tp = model.add_device_configuration("tp", num_devices=2)
    model.graph[0].attributes["then_branch"].as_graph()[0].set_pipeline_stage(tp, 1)
    assert any(
        "annotations of 1 nodes inside of bodies, the first 'inner'" in each
        for each in compiled(ir.to_proto(model), None).warnings
    )


def test_a_plan_of_too_few_ranks() -> None:
    proto = written(compiled(mlp(), "ranks: 3\nsharding: {up: colwise}\n"))
    with pytest.raises(CompileError, match=r"plan.yaml: 'up' is annotated for device 2, but there are 2 ranks"):
        compiled(proto, "ranks: 2\n")


def test_annotations_survive_the_inlining_of_functions() -> None:
    text = """<ir_version: 11, opset_import: ["" : 21, "own" : 1]>
    main (float[batch, 12] x) => (float[batch, 6] y) { [first] h = own.twice(x)  [up] y = MatMul(h, w) }
    <opset_import: ["" : 21], domain: "own"> twice (a) => (b) { [add] b = Add(a, a) }"""
    model = ir.from_proto(with_weights(text, {"w": (12, 6)}))
    tp = model.add_device_configuration("tp", num_devices=2)
    model.graph[1].shard(model.graph[1].inputs[0], configuration=tp, axis=1, num_shards=2, device_indices=(0, 1))
    program = compiled(ir.to_proto(model), None)
    assert kinds(program) == ["Reduce"]
    model.graph[0].set_pipeline_stage(tp, 1)
    with pytest.raises(CompileError, match="'first' calls the function twice and is annotated"):
        compiled(ir.to_proto(model), None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx")
    (tmp_path / "plan.yaml").write_text("ranks: 2\nsharding: {up: colwise, down: rowwise}\n")
    again = tmp_path / "cut.onnx"
    build = ["-o", str(tmp_path / "build")]
    assert (
        invoke(
            [
                "compile",
                str(tmp_path / "m.onnx"),
                "--plan",
                str(tmp_path / "plan.yaml"),
                "--annotated",
                str(again),
                *build,
            ]
        )
        == 0
    )
    assert invoke(["compile", str(again), *build]) == 0
    assert "2 ranks" in capsys.readouterr().out
    assert all(not node.device_configurations for node in onnx.load(tmp_path / "build" / "rank_0000.onnx").graph.node)
    assert invoke(["compile", str(again), *build, "--configuration", "none"]) == 0
    assert "1 rank" in capsys.readouterr().out


def test_weights_that_are_read_are_not_overwritten(tmp_path: Path) -> None:
    model = ir.from_proto(mlp())
    ir.save(model, tmp_path / "m.onnx", external_data="weights.bin")
    (tmp_path / "plan.yaml").write_text("ranks: 1\n")
    with pytest.raises(CompileError, match=r"the model's weights are read from 'weights\.bin'"):
        compile_model(
            tmp_path / "m.onnx", tmp_path / "plan.yaml", tmp_path / "build", annotated=tmp_path / "weights.bin"
        )
