"""Blocks without gradients in what torch traced by bytecode: branches of `torch.cond`, and a module that only its strict export takes.

There a block `with torch.no_grad()` is a call of a graph by `wrap_with_set_grad_enabled`, which a later step of the export inlines and
forgets. Each floating-point tensor that such a graph makes is detached here before, unless a block inside turned gradients on again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def traced_blocks_detached() -> Iterator[None]:
    """While in here, programs of `torch.export.export` detach what blocks without gradients make."""
    import torch

    export = torch.export.export

    @functools.wraps(export)
    def detaching(*args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        with torch.enable_grad():  # else a block that turns them off would leave no trace
            program = export(*args, **kwargs)
        _detach(program.graph_module, False)
        return program

    torch.export.export = detaching
    try:
        yield
    finally:
        torch.export.export = export


def _detach(module: torch.fx.GraphModule, off: bool) -> None:
    """Detaches in `module` and the graphs that it calls; `off`: gradients are off where it is called."""
    import torch

    block, detach = torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.aten.detach.default
    graph = module.graph
    for node in [*graph.nodes]:
        if node.op != "call_function":
            continue
        called = [getattr(module, one.target) for one in node.all_input_nodes if one.op == "get_attr"]
        for inner in called:
            if isinstance(inner, torch.fx.GraphModule):
                _detach(inner, not node.args[0] if node.target is block else off)
        value = node.meta.get("val")
        if off and isinstance(node.target, torch._ops.OpOverload) and _is_floating(value):
            with graph.inserting_after(node):
                detached = graph.call_function(detach, (node,))
            detached.meta = {**node.meta}
            node.replace_all_uses_with(detached, lambda user, detached=detached: user is not detached)
    module.recompile()


def _is_floating(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()
