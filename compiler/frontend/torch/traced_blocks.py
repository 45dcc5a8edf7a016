"""Detaches results of blocks without gradients in code that torch traced by bytecode: branches of `torch.cond`, and its strict export.

There a block `with torch.no_grad()` is a call of a graph by `wrap_with_set_grad_enabled`, which a later step of the export inlines and
forgets. Before that step, each floating-point tensor that such a graph makes is detached, unless an inner block turned gradients on again.
A block `with torch.inference_mode()` leaves no call at all, so it is traced as a block without gradients, inside of which gradients cannot
be turned on.
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
    """A context in which programs of `torch.export.export` detach the results of blocks without gradients."""
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
        with _inference_as_blocks():
            yield
    finally:
        torch.export.export = export


@contextmanager
def _inference_as_blocks() -> Iterator[None]:
    """A context in which a traced block of inference turns gradients off, and on again at its end."""
    import torch
    from torch.autograd import grad_mode
    from torch.overrides import TorchFunctionMode

    class Off(TorchFunctionMode):
        """A mode in which `torch.enable_grad()` has no effect inside a block of inference."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch._C._set_grad_enabled and inferring[-1]:
                return None
            return func(*args, **(kwargs or {}))

    inferring: list[bool] = []
    """For each enclosing block, innermost last, whether it is a block of inference; `inference_mode(False)` is not."""

    def enter(mode: bool) -> tuple[bool, Off | None]:
        before = torch.is_grad_enabled()
        inferring.append(False)
        torch._C._set_grad_enabled(not mode)
        inferring[-1] = mode
        off = Off() if mode else None
        if off is not None:
            off.__enter__()  # type: ignore[no-untyped-call]
        return before, off

    def leave(entered: tuple[bool, Off | None]) -> None:
        before, off = entered
        if off is not None:
            off.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        inferring[-1] = False
        torch._C._set_grad_enabled(before)
        inferring.pop()

    was = grad_mode._enter_inference_mode, grad_mode._exit_inference_mode
    functools.update_wrapper(enter, was[0])  # the graph's code uses these names
    functools.update_wrapper(leave, was[1])
    grad_mode._enter_inference_mode, grad_mode._exit_inference_mode = enter, leave
    try:
        yield
    finally:
        grad_mode._enter_inference_mode, grad_mode._exit_inference_mode = was


def _detach(module: torch.fx.GraphModule, off: bool) -> None:
    """Detaches tensors in `module` and the graphs that it calls; `off`: gradients are off where it is called."""
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
