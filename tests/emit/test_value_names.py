"""Names of values where they are written, and nodes over values that stand for the job's."""

import numpy as np
import onnx_ir as ir
import pytest
from equivalence import model, same_as_whole
from partc.compiler.ir.graph import name_of, operand_name, operands_of
from partc.compiler.ir.programs import Value, ValueMap


def test_a_value_without_a_name_is_a_fault() -> None:
    assert name_of(ir.Value(name="h")) == "h"
    for nameless in (ir.Value(), ir.Value(name=""), ir.Node("", "Relu", [])):
        with pytest.raises(ValueError, match="no pass has given a name"):
            name_of(nameless)


def test_only_an_absent_operand_has_an_empty_name() -> None:
    node = ir.Node("", "Clip", [ir.Value(name="x"), None], outputs=[ir.Value(name="y"), ir.Value(name="")])
    assert operands_of(node) == (("x", ""), ("y", ""))
    with pytest.raises(ValueError, match="no pass has given a name"):
        operand_name(ir.Value())


def test_values_of_one_text_stay_apart() -> None:
    first, second, made = Value("w"), Value("w"), Value("w")
    values = ValueMap()
    operands, out = [values.of(first), values.of(second), None], values.of(made)
    (op,) = values.ops([ir.Node("", "Add", operands, outputs=[out], name="w")])
    assert [one is wanted for one, wanted in zip(op.inputs, (first, second, None), strict=True)] == [True] * 3
    assert op.outputs == (made,)
    assert op.label is made


def test_a_node_of_another_name_keeps_it() -> None:
    values = ValueMap()
    x, y = Value("x"), Value("y")
    nodes = [ir.Node("", "Relu", [values.of(x)], outputs=[values.of(y)], name="x.update")]
    assert [op.label for op in values.ops(nodes)] == ["x.update"]


ABSENT = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 4] x, bool c) => (float[batch, 6] z, float[batch, 1] inverse)
<float[4, 6] w = {1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1, 1, 0, 2, 0, 3, 0, 2, 2, 1, 1, 0, 0}, float[6] scale = {1, 2, 3, 1, 2, 3}> {
    [product] h = MatMul (x, w)
    [norm] n, , inverse = LayerNormalization (h, scale)
    [branch] z = If (c) <
        then_branch = a () => (float[batch, 6] t) { t, , u = LayerNormalization (n, scale) },
        else_branch = b () => (float[batch, 6] r) { r = Relu (n) }>
}
"""


@pytest.mark.parametrize(
    "plan", ["placement: {product: 0, norm: 1}", "dataset: {x: [2, 1]}", "sharding: {product: colwise}"]
)
def test_outputs_that_are_absent_need_no_name(plan: str) -> None:
    x = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)
    steps = [{"x": x, "c": np.array(c)} for c in (True, False)]
    text = f"ranks: 2\nsymbols: {{batch: {{divisor: 2}}}}\n{plan}\n"
    same_as_whole(model(ABSENT), text, *steps, rtol=1e-5, atol=1e-5)
