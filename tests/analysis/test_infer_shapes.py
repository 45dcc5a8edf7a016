"""Shapes are inferred in one way: the loss, the training forms of nodes and the pass take the same rules and the same promises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from equivalence import model
from partc.compiler.analysis.bindings import promised
from partc.compiler.analysis.part_symbols import part_facts
from partc.compiler.autodiff.scope import Scope
from partc.compiler.dims.facts import Facts
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Typed
from partc.compiler.ir.training import ProgramKind
from partc.compiler.pipeline import run_passes, start
from partc.compiler.plan.read import parse_plan
from partc.compiler.rewrite.train_mode import ranked
from partc.compiler.training.graph_appender import GraphAppender
from partc.compiler.training_passes import add_training

COMPILER = Path(__file__).parents[2] / "compiler"
TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: sgd, lr: 0.1}%s}\n"
HALF = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[m, 6] y) {
    [cut] a, b = Split<axis=0, num_outputs=2>(x) [most] y = Max(a, b) }"""


def chain(length: int) -> onnx.ModelProto:
    """A model whose batch is cut into three parts, and two of them joined, so many times."""
    body, x = "", "x"
    for k in range(length):
        body += f"a{k}, b{k}, c{k} = Split<axis=0, num_outputs=3>({x}) d{k} = Concat<axis=0>(b{k}, a{k})\n"
        x = f"d{k}"
    proto = model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[m, 6] y) {{ {body} y = Mul({x}, w) }}'.replace(
            "float[n, 6] x)", "float[n, 6] x, float[6] w)"
        )
    )
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(6, np.float32), "w"))
    return proto


def begun(proto: onnx.ModelProto, plan: str, part: ProgramKind = ProgramKind.STEP) -> Typed:
    """The program before its shapes are inferred."""
    source = Source(from_proto(proto, Path("model.onnx")))
    return run_passes(start(source, parse_plan(plan, "plan.yaml"), "model.onnx", kind=part), add_training)


def test_only_one_function_runs_the_engine() -> None:
    """Every other caller would have its own rules, or know less of the dims."""
    callers = [path.name for path in sorted(COMPILER.rglob("*.py")) if "infer_symbolic_shapes(" in path.read_text()]
    assert callers == ["infer_shapes.py"]


def test_what_is_appended_knows_what_is_promised() -> None:
    """Half of a batch that is a multiple of 4 is not rounded; of one that may be odd, the larger part comes first."""
    proto = from_proto(model(HALF), Path("model.onnx"))
    dims = {
        divisor: GraphAppender(proto, "loss", "plan.yaml", {"n": Facts(divisor=divisor)}).prediction("y")[1]
        for divisor in (1, 4)
    }
    assert str(dims[4][0]) == "n/2"
    assert str(dims[1][0]) != "n/2"
    most = next(node for node in proto.graph if node.op_type == "Max")
    assert str(ranked(proto, [most], {"n": Facts(divisor=4)})[most].shape) == "[n/2,6]"


@pytest.mark.parametrize(
    ("dims", "symbols", "facts"),
    [
        ("", "n: {divisor: 4}", Facts(divisor=4, min=4)),
        ("inputs: {x: [batch, 6]}\n", "batch: {divisor: 8}", Facts(divisor=8, min=8)),
        ("inputs: {x: [12, 6]}\n", "", Facts.constant(12)),
    ],
)
def test_promises_are_found_by_the_names_of_the_model(dims: str, symbols: str, facts: Facts) -> None:
    """The plan may give dims other names, or sizes; before it is bound the model has its own."""
    program = begun(model(HALF), f"ranks: 1\nsymbols: {{{symbols}}}\n{dims}")
    assert promised(program) == {"n": facts}


def test_dims_without_a_name_have_promises() -> None:
    """They are told by the input and the axis, as the compiler names them."""
    proto = model(HALF)
    proto.graph.input[0].type.tensor_type.shape.dim[0].ClearField("dim_param")
    program = begun(proto, "ranks: 1\nsymbols: {b: {divisor: 4}}\ninputs: {x: [b, 6]}\n")
    assert promised(program) == {"x_dim_0": Facts(divisor=4, min=4)}


def test_a_part_of_a_batch_is_promised_less() -> None:
    """A batch of 8 and more in two parts: each has 4 and more."""
    plan = parse_plan("ranks: 1\n" + TRAIN % ", accumulate: 2", "plan.yaml")
    graph = from_proto(model(HALF), Path("model.onnx")).graph
    assert plan.train is not None
    known = {"n": Facts(divisor=4, min=8)}
    assert part_facts(graph, plan.train, ProgramKind.STEP, {}, known) == {"n": Facts(divisor=2, min=4)}
    assert part_facts(graph, plan.train, ProgramKind.EVALUATION, {}, known) == known


def test_long_chains_of_splits_train() -> None:
    """Nested roundings of a dim of which nothing is known would take the better part of a minute."""
    program = begun(chain(4), "ranks: 1\nsymbols: {n: {divisor: 81}}\n" + TRAIN % "")
    target = next(value for value in program.model.graph.inputs if value.name == "t")
    assert target.shape is not None
    assert len(target.shape) == 2


def test_a_gradient_takes_the_same_rules() -> None:
    """Sizes that only a fitting batch has are exact quotients in the backward pass, too, and not rounded ones."""
    scope = Scope()
    scope.know([ir.Value(name="dy", shape=ir.Shape(["n", 6]), type=ir.TensorType(ir.DataType.FLOAT))])
    rows = scope.constant("rows", np.array([-1, 4], np.int64))
    scope.add(scope.node("Reshape", ["dy", rows], ["dx"]))
    assert str(scope.value("dx").shape) == "[3*n/2,4]"
