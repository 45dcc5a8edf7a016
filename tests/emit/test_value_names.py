"""Names of values where they are written, and nodes over values that stand for the job's."""

import onnx_ir as ir
import pytest
from partc.compiler.ir.graph import name_of, operand_name, operands_of
from partc.compiler.ir.programs import Value
from partc.compiler.ir.stand_ins import StandIns


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
    values = StandIns()
    operands, out = [values.of(first), values.of(second), None], values.of(made)
    (op,) = values.ops([ir.Node("", "Add", operands, outputs=[out], name="w")])
    assert [one is wanted for one, wanted in zip(op.inputs, (first, second, None), strict=True)] == [True] * 3
    assert op.outputs == (made,)
    assert op.label is made


def test_a_node_of_another_name_keeps_it() -> None:
    values = StandIns()
    x, y = Value("x"), Value("y")
    nodes = [ir.Node("", "Relu", [values.of(x)], outputs=[values.of(y)], name="x.update")]
    assert [op.label for op in values.ops(nodes)] == ["x.update"]
