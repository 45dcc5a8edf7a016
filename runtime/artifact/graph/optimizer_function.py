"""Proves from the body of an optimizer's function that it can run over flat memory, in place.

A function of `partc.optimizer` may run on any slice of its tensors if its body is element-wise (`is_elementwise`). The next parameter
and slots may be written over the old ones if no node reads the old ones after that (`is_in_place`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import FunctionProto

ELEMENTWISE = frozenset(("Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Pow", "Sqrt", "Sub"))
NEXT = "_next"
"""The suffix of an updated tensor: the output `x_next` is the new value of the input `x`."""


def is_elementwise(function: FunctionProto) -> bool:
    """Whether each element of an output depends only on the inputs' same element: all nodes are element-wise ops or scalar constants."""
    return all(
        (node.op_type in ELEMENTWISE and node.domain in ("", "ai.onnx"))
        or (node.op_type == "Constant" and [attribute.name for attribute in node.attribute] == ["value_float"])
        for node in function.node
    )


def is_in_place(function: FunctionProto) -> bool:
    """Whether each output `x_next` may be written over the input `x`.

    It may if the node that makes it is element-wise, or is a ScatterND that writes rows into `x`, and every other reader of `x` is an
    ancestor of that node, and so runs before it in any order.
    """
    makers = {output: node for node in function.node for output in node.output}
    for output in function.output:
        if not output.endswith(NEXT):
            continue
        if output not in makers:
            return False
        maker = makers[output]
        before: set[str] = set()
        reached = list(maker.input)
        while reached:
            name = reached.pop()
            if name not in before:
                before.add(name)
                reached += makers[name].input if name in makers else ()
        old = output.removesuffix(NEXT)
        readers = [node for node in function.node if old in node.input and node is not maker]
        # a ScatterND whose input and output are one memory writes only the elements that it replaces
        scatters = maker.op_type == "ScatterND" and list(maker.input[:1]) == [old] and old not in maker.input[1:]
        if maker.op_type not in ELEMENTWISE and not scatters:
            return False
        if any(before.isdisjoint(node.output) for node in readers):
            return False
    return True
