"""Marks values of a torch module that pass no gradient on: `x.detach()`, `x.data`, results of `torch.no_grad()` and `inference_mode()`.

An exported graph has `detach` as an Identity, which every clean-up removes, and no sign of a block without gradients. So each tensor that
such a block makes is detached while the module is traced, and an Identity that stands for `detach` gets a mark, `STOPS_GRADIENT`:

    with torch.no_grad():                    taught = MatMul(x, teacher.weight)
        taught = self.teacher(x)             taught.detach = Identity(taught) {partc.stops_gradient}
    return self.student(x) - taught          y = Sub(student, taught.detach)

A `torch.autograd.Function` has a backward that no graph has: an Identity after it gets its name, `OWN_BACKWARD`.
Marks stand only where a gradient would go on to a parameter: for a block that is its edge; nodes without parameters before them get none.

Detaches results of blocks without gradients in code that torch traced by bytecode: branches of `torch.cond`, and its strict export.

There a block `with torch.no_grad()` is a call of a graph by `wrap_with_set_grad_enabled`, which a later step of the export inlines and
forgets. Before that step, each floating-point tensor that such a graph makes is detached, unless an inner block turned gradients on again.
A block `with torch.inference_mode()` leaves no call at all, so it is traced as a block without gradients, inside of which gradients cannot
be turned on.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from partc.compiler.errors import Problem
from partc.compiler.frontend.torch.autograd_effects import Observer
from partc.compiler.frontend.torch.rewritten_functions import rewritten
from partc.compiler.ir.graph import OWN_BACKWARD, STOPS_GRADIENT, nodes_of, read_by

if TYPE_CHECKING:
    import torch
    from partc.compiler.directives.recorder import Recorder


_CLASSES = "pkg.torch.onnx.class_hierarchy"
_DETACH, _ALIAS = "aten.detach.default", "aten.alias.default"
_KEPT = "partc.frontend"
"""The domain of a marked Identity during a clean-up, which leaves ops of an unknown domain alone."""


@contextmanager
def blocks_detached(module: torch.nn.Module, observer: Observer) -> Iterator[list[str]]:
    """A context for tracing `module`: its forward detaches the tensors that it makes while it has turned gradients off.

    `observer` gets each call in forward. The results of each `torch.autograd.Function` go through `aten.alias`; the list gets the names of
    these functions. Ops run without gradients, as outside of this context: only the code of `forward` sees them on, so that it can turn
    them off.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    kind, mode, function = type(module), _mode(observer), torch.autograd.Function
    forward, is_own = kind.forward, "forward" in vars(kind)

    @functools.wraps(forward)
    def detaching(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        # in this order: dynamo would name submodules after the variable that it meets first
        if torch.compiler.is_dynamo_compiling() or self is not module:
            return forward(self, *args, **kwargs)
        before = torch.is_grad_enabled()
        _enable(True)
        try:
            with mode(), observer.attributes():
                return forward(self, *args, **kwargs)
        finally:
            _enable(before)

    applied = vars(function)["apply"]

    def apply(cls: type, /, *args: object, **kwargs: object) -> object:
        made = applied.__get__(None, cls)(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling() or cls.__module__.partition(".")[0] == "torch":
            return made
        called.append(cls.__qualname__)
        return tree_map_only(torch.Tensor, torch.ops.aten.alias.default, made)

    called: list[str] = []
    function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    kind.forward = detaching  # on the class: a trace by bytecode would take an instance's `forward` for a submodule
    try:
        yield called
    finally:
        function.apply = applied  # type: ignore[method-assign]
        if is_own:
            kind.forward = forward
        else:
            del kind.forward


def observe_apart(module: torch.nn.Module, recorder: Recorder, arguments: Mapping[str, Any]) -> Observer:
    """Runs a copy of the module under a new observer, and returns that observer.

    This is for a forward that torch traced by bytecode: the observer of the trace has seen nothing of it.
    """
    import torch

    try:
        copied = copy.deepcopy(module)
        observer = Observer(copied, recorder)
        with torch.random.fork_rng(devices=[]), blocks_detached(copied, observer):
            copied(*arguments.get("args", ()), **arguments.get("kwargs", {}))
    except Exception as error:
        observer = Observer(module, recorder)
        fact = f"forward was traced by bytecode, and does not run on example inputs: {type(error).__name__}: {error}"
        law = "hooks of gradients, and what changes without them, are found when it runs"
        observer.problems.append(Problem("the module", fact, law, "make forward run on its example inputs"))
    return observer


def mark(model: ir.Model, parameters: Collection[str], called: Collection[str]) -> None:
    """Marks each Identity that stops the gradient of one of `parameters`, by name; in functions and bodies it marks every `detach`.

    `called`: the names of the `torch.autograd.Function`s that ran, for the Identity after each one's results.
    """
    graph = model.graph
    followed = {value for name, value in graph.initializers.items() if name in parameters}
    for node in graph:
        if _is(node, _DETACH):
            if not followed.isdisjoint(node.inputs):
                node.metadata_props[STOPS_GRADIENT] = "true"
        elif not followed.isdisjoint(read_by(node)):
            if called and _is(node, _ALIAS):
                node.metadata_props[OWN_BACKWARD] = ", ".join(dict.fromkeys(called))
            followed.update(out for out in node.outputs if out.dtype is None or out.dtype.is_floating_point())
    for node in _every(model):
        if node.graph is not graph and _is(node, _DETACH):
            node.metadata_props[STOPS_GRADIENT] = "true"


@contextmanager
def marks_preserved(model: ir.Model) -> Iterator[None]:
    """A context in which a clean-up of the model does not remove marked nodes as if they were copies."""
    for node in _every(model):
        if not {STOPS_GRADIENT, OWN_BACKWARD}.isdisjoint(node.metadata_props):
            node.domain = _KEPT
    yield
    for node in _every(model):
        if node.domain == _KEPT:
            node.domain = ""


def _every(model: ir.Model) -> Iterator[ir.Node]:
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from nodes_of(graph)


def _is(node: ir.Node, operator: str) -> bool:
    return node.op_type == "Identity" and operator in node.metadata_props.get(_CLASSES, "")


def _enable(on: bool) -> None:
    """Turns gradients on or off without leaving a node in the trace."""
    import torch

    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(on)


def _mode(observer: Observer) -> Callable[[], Any]:
    import torch
    from torch import _C, Tensor, is_grad_enabled, is_inference_mode_enabled
    from torch.compiler import is_dynamo_compiling
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    data, functions = getattr_static(Tensor, "data").__get__, rewritten()

    class Detaching(TorchFunctionMode):
        """Tracks whether forward has turned gradients off, and detaches the results of functions while it has.

        `off` is not torch's own switch: that is also off inside of a `torch.autograd.Function`, through which a gradient flows.
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
            if args and observer.answers(func, args):
                return observer.answer(func, args)
            if func is _C._set_grad_enabled:
                self.off = (self.off or on) and not args[0]
                return _enable(args[0])
            if func == data:
                shown = args[0].detach()
                observer.detached(args, shown)
                return shown
            self.off = self.off and not on
            # branches of a `torch.cond` turn gradients off themselves
            _enable(on and isinstance(func, torch._ops.HigherOrderOperator))
            try:
                traced: Callable[..., Any] = functions.get(func, func)
                result = traced(*args, **kwargs or {})
            finally:
                _enable(on)
            off = self.off or is_inference_mode_enabled()
            if off:
                given = {id(one) for one in tree_leaves((args, kwargs))}
                result = tree_map_only(Tensor, lambda one: one if id(one) in given else one.detach(), result)
            observer.note(func, args, kwargs, result, off)
            return result

    return Detaching


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
