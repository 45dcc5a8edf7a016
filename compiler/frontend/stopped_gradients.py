"""What of a torch module takes no gradient: `x.detach()`, `x.data`, and what is made in a block `with torch.no_grad()`.

An exported graph has `detach` as an Identity, which every clean-up takes out, and of a block nothing at all. So each tensor that a block
makes is detached while the module is traced, and an Identity that stands for `detach` gets a mark, `STOPS_GRADIENT`:

    with torch.no_grad():                    taught = MatMul(x, teacher.weight)
        taught = self.teacher(x)             taught.detach = Identity(taught) {partc.stops_gradient}
    return self.student(x) - taught          y = Sub(student, taught.detach)

Marks stand only where a gradient would go on to a parameter: of a block that is its edge, and of what has no parameters nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from partc.compiler.ir.graph import STOPS_GRADIENT, nodes_of, read_by

if TYPE_CHECKING:
    import torch

_CLASSES = "pkg.torch.onnx.class_hierarchy"
_DETACH = "aten.detach.default"
_KEPT = "partc.frontend"
"""The domain of a marked Identity during a clean-up, which leaves ops alone that it does not know."""


@contextmanager
def blocks_detached(module: torch.nn.Module) -> Iterator[None]:
    """While `module` is traced in here, its forward detaches what it makes where it has turned gradients off.

    Its ops run without gradients, as they do around this: only `forward` itself sees them on, so that it can turn them off.
    """
    import torch

    kind, mode = type(module), _mode()
    forward, is_own = kind.forward, "forward" in vars(kind)

    @functools.wraps(forward)
    def detaching(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        if self is not module or torch.compiler.is_dynamo_compiling():
            return forward(self, *args, **kwargs)
        before = torch.is_grad_enabled()
        _enable(True)
        try:
            with mode():
                return forward(self, *args, **kwargs)
        finally:
            _enable(before)

    kind.forward = detaching  # of its class: what torch traces by bytecode would take one of the module for a submodule
    try:
        yield
    finally:
        if is_own:
            kind.forward = forward
        else:
            del kind.forward


def mark(model: ir.Model, parameters: Collection[str]) -> None:
    """Marks each Identity that keeps a gradient from one of `parameters`, by name; of those in functions and bodies each."""
    graph = model.graph
    followed = {value for name, value in graph.initializers.items() if name in parameters}
    for node in graph:
        if _detaches(node):
            if not followed.isdisjoint(node.inputs):
                node.metadata_props[STOPS_GRADIENT] = "true"
        elif not followed.isdisjoint(read_by(node)):
            followed.update(out for out in node.outputs if out.dtype is None or out.dtype.is_floating_point())
    for node in _every(model):
        if node.graph is not graph and _detaches(node):
            node.metadata_props[STOPS_GRADIENT] = "true"


@contextmanager
def marks_kept(model: ir.Model) -> Iterator[None]:
    """Keeps a clean-up of the model in here from taking marked nodes for copies."""
    for node in _every(model):
        if STOPS_GRADIENT in node.metadata_props:
            node.domain = _KEPT
    yield
    for node in _every(model):
        if node.domain == _KEPT:
            node.domain = ""


def _every(model: ir.Model) -> Iterator[ir.Node]:
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from nodes_of(graph)


def _detaches(node: ir.Node) -> bool:
    return node.op_type == "Identity" and _DETACH in node.metadata_props.get(_CLASSES, "")


def _enable(on: bool) -> None:
    """Turns gradients on or off without a trace in what is being exported."""
    import torch

    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(on)


def _mode() -> Callable[[], Any]:
    from torch import _C, Tensor, is_grad_enabled
    from torch.compiler import is_dynamo_compiling
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    data = getattr_static(Tensor, "data").__get__

    class Detaching(TorchFunctionMode):
        """Follows whether forward has turned gradients off, and detaches what functions then make.

        `off` is not torch's own switch: that is off, too, inside of a `torch.autograd.Function`, through which a gradient flows.
        """

        off = False

        def __torch_function__(
            self,
            func: Callable[..., Any],
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            if is_dynamo_compiling():
                return func(*args, **kwargs or {})
            on = is_grad_enabled()
            if func is _C._set_grad_enabled:
                self.off = (self.off or on) and not args[0]
                return _enable(args[0])
            if func == data:
                return args[0].detach()
            self.off = self.off and not on
            _enable(False)
            try:
                made = func(*args, **kwargs or {})
            finally:
                _enable(on)
            if not self.off:
                return made
            given = {id(one) for one in tree_leaves((args, kwargs))}
            return tree_map_only(Tensor, lambda one: one if id(one) in given else one.detach(), made)

    return Detaching
