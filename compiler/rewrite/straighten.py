"""Pass: removes detours of Reshapes: dims are transposed in place, and a Reshape with its inverse is removed.

Exporters that do not know a rank merge the leading dims, transpose the last ones, and take the leading dims apart again. Of a merged
dim only the major-most part can be sharded, and that is not the heads:

    (batch, 8, seq, 16) -> Reshape (8*batch, seq, 16) -> Transpose (8*batch, 16, seq) -> Reshape (batch, 8, 16, seq)
    (batch, 8, seq, 16) -> Reshape (batch, 8, seq, 16) -> Transpose (batch, 8, 16, seq)

Any dim may then be sharded. The elements move as before, and nothing else changes. A plan without shardings keeps such detours.

In a step of a decoder the heads of a projection are split and joined again, since the fused attention takes them joined. Each layer
would have four such pairs, of two nodes that compute nothing:

    (batch, seq, 512) -> Reshape (batch, seq, 8, 64) -> Reshape (batch, seq, 512)
    (batch, seq, 512)
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.autodiff.shapes import inverse
from partc.compiler.ir.graph import name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ops.node import constant_ints, counted, same
from partc.compiler.rewrite.opset import cuts
from partc.compiler.rewrite.rewriting import Rewriting


def straighten(program: Typed) -> Typed:
    """Returns the program without such detours; `paths` and `values` are updated."""
    is_cut = cuts(program.plan, program.declared)
    if not is_cut and program.generation is None:
        return program
    work = Rewriting(program)
    for node in [node for node in work.graph if node.op_type == "Reshape"]:
        if is_cut and (found := _detour(node)):
            _straight(work, *found)
        elif program.generation is not None and (first := _there(node)):
            assert first.inputs[0] is not None
            work.take_place(first.inputs[0], node.outputs[0], node)
            work.drop([first, node])
    return work.done()


def _there(back: ir.Node) -> ir.Node | None:
    """Returns the Reshape that `back` undoes, or None."""
    first = _producer(back.inputs[0], "Reshape")
    source = first.inputs[0] if first is not None else None
    if first is None or source is None or source.shape is None or back.outputs[0].shape is None:
        return None
    if first.device_configurations or back.device_configurations:
        return None  # annotations are for these nodes
    dims, made = source.shape, back.outputs[0].shape
    return first if len(dims) == len(made) and all(map(same, dims, made)) else None


def _detour(last: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Returns the Reshape, the Transpose and the Reshape of the detour that ends in `last`; None where there is none."""
    turn = _producer(last.inputs[0], "Transpose")
    first = _producer(turn.inputs[0], "Reshape") if turn is not None else None
    if turn is None or first is None or first.inputs[0] is None or len(list(turn.outputs[0].uses())) > 1:
        return None
    source, merged, target_shape = (value.shape for value in (first.inputs[0], first.outputs[0], last.outputs[0]))
    turned = turn.outputs[0].shape
    if source is None or merged is None or target_shape is None or turned is None or turn.outputs[0].is_graph_output():
        return None
    order = _order(turn, len(merged))
    inner = len(merged) - 1
    if not inner or order[0] != 0 or len(target_shape) <= len(merged) or len(source) <= inner:
        return None
    if any(node.device_configurations for node in (first, turn, last)):
        return None  # annotations are for these nodes
    kept = all(same(source[-k], merged[-k]) and same(turned[-k], target_shape[-k]) for k in range(1, inner + 1))
    return (first, turn, last) if kept and not _copies_a_dim(last) else None


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and node.domain in ("", "ai.onnx") else None


def _order(turn: ir.Node, rank: int) -> list[int]:
    return [counted(axis, rank) for axis in turn.attributes.get_ints("perm") or reversed(range(rank))]


def _copies_a_dim(node: ir.Node) -> bool:
    """Whether a Reshape's target may have a 0, which copies a dim: another input may have another size there."""
    if node.attributes.get_int("allowzero", 0):
        return False
    target = constant_ints(node, 1)
    if target is not None:
        return 0 in target
    joined = _producer(node.inputs[1], "Concat")
    return joined is None or any(0 in (constant_ints(joined, k) or ()) for k in range(len(joined.inputs)))


def _straight(work: Rewriting[Typed], first: ir.Node, turn: ir.Node, last: ir.Node) -> None:
    """Replaces a detour by a Reshape to the dims of the end, and a Transpose of these."""
    end, merged = last.outputs[0], first.outputs[0].shape
    assert end.shape is not None
    assert merged is not None
    lead = len(end.shape) - len(merged) + 1
    perm = [*range(lead), *(axis - 1 + lead for axis in _order(turn, len(merged))[1:])]
    back = inverse(perm)
    regrouped = work.turned(end, name_of(turn.outputs[0]), back)
    turned = work.like(end, name_of(end))
    kept = [attribute for name, attribute in last.attributes.items() if name == "allowzero"]
    work.put(last, "Reshape", [first.inputs[0], _target(work, last, back)], [regrouped], ".regrouped", kept)
    work.put(last, "Transpose", [regrouped], [turned], perm=perm)
    end.replace_all_uses_with(turned, replace_graph_outputs=True)
    work.drop([first, turn, last])


def _target(work: Rewriting[Typed], last: ir.Node, back: list[int]) -> ir.Value:
    """Returns the target of `last` with its entries in the order of the dims before the Transpose."""
    old_target = last.inputs[1]
    assert old_target is not None
    numbers, path = constant_ints(last, 1), work.paths[last]
    if numbers is not None:
        return work.constant(f"{path}.regrouped_to", [numbers[axis] for axis in back])
    made = work.like(old_target, f"{path}.regrouped_to")
    work.put(
        last, "Gather", [old_target, work.constant(f"{path}.regrouped_order", back)], [made], ".regrouped_to", axis=0
    )
    return made
