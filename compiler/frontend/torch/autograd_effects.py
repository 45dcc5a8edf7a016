"""Finds effects of torch's training that an exported graph lacks: hooks of gradients, writes to buffers, scaled gradients.

The graph of such a module is right for inference, but its training would differ from torch's without any message. So each effect is
written into the model's metadata as a problem (`UNTRAINABLE`), and a compile for training fails with it:

    self.body.weight.register_hook(...)    'body.weight': has a hook of its gradient (Tensor.register_hook)
    self.count += 1                        'count': the forward changes this buffer

A hook of a tensor is registered while forward runs, mostly below `if h.requires_grad`. The trace runs without gradients, so an `Observer`
tracks which tensors depend on parameters, and answers in place of autograd.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import CHANGED_BY_FORWARD, GRADIENT_FORM, UNTRAINABLE, nodes_of

if TYPE_CHECKING:
    import torch
    from partc.compiler.directives.recorder import Recorder

_NO_HOOKS = "the exported graph has no hooks, and a training would differ from torch's"
_REMEDY_OF_HOOKS = (
    "write it in the operators of forward (a gradient times c: `c * x + (1 - c) * x.detach()`), or remove the hook"
)
_NO_WRITES = "the exported graph changes nothing of its module, and the next step would begin with the old value"
_REMEDY_OF_WRITES = (
    "call eval() of its module, if it then stays as it is, or change it between trainings, outside of forward"
)
_EMBEDDING = re.compile(
    r"aten\.embedding\.default\]\(args = \(%\w+, %\w+(?:, (-?\w+))?(?:, (\w+))?(?:, (\w+))?\), kwargs = (\{.*?\})\)"
)
_OPEN_BOUNDS = re.compile(r"aten\.(hardtanh|relu6)\.default\]")
_EXTREME = re.compile(r"aten\.(?:max|min)\.dim\]\(args = \(%\w+, (-?\d+)")
_CALL = "pkg.torch.onnx.fx_node"
_OPERATORS = ("add", "and", "div", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
_ASSIGNMENTS = ("__setitem__", *[f"__i{name}__" for name in _OPERATORS])
_HOOKS_OF_MODULES = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


def hook_problems(module: torch.nn.Module) -> Iterator[Problem]:
    """Yields a problem for each hook of a gradient that the module's parameters or submodules have."""
    import torch

    for name, parameter in module.named_parameters():
        for attribute, call in _HOOKS_OF_PARAMETERS.items():
            if parameter.requires_grad and getattr(parameter, attribute, None):
                yield Problem(f"'{name}'", f"has a hook of its gradient ({call})", _NO_HOOKS, _REMEDY_OF_HOOKS)
    for path, one in module.named_modules():
        if any(getattr(one, attribute, None) for attribute in _HOOKS_OF_MODULES):
            fact = f"{type(one).__name__} has a backward hook (register_full_backward_hook or a like one)"
            yield Problem(_where(path), fact, _NO_HOOKS, _REMEDY_OF_HOOKS)
    modules = torch.nn.modules.module
    if modules._global_backward_hooks or modules._global_backward_pre_hooks:
        fact = "all modules have a backward hook (register_module_full_backward_hook or a like one)"
        yield Problem(_where(""), fact, _NO_HOOKS, _REMEDY_OF_HOOKS)


def refuse_cumulative_averages(module: torch.nn.Module) -> None:
    """Raises CompileError for each BatchNorm in training mode with momentum=None, the mean of all batches, which torch cannot export."""
    import torch

    problems = []
    for path, one in module.named_modules():
        if isinstance(one, torch.nn.modules.batchnorm._BatchNorm) and one.training and one.momentum is None:
            fact = f"{type(one).__name__}(momentum=None) keeps the mean of all batches, and its share follows from their number"
            law = "running statistics move by a share that is known when the module is exported"
            problems.append(
                Problem(_where(path), fact, law, "give it a momentum, such as 0.1; for inference call eval()")
            )
    if problems:
        raise CompileError(problems)


def write_problems(module: torch.nn.Module, program: torch.export.ExportedProgram) -> Iterator[Problem]:
    """Yields a problem for each buffer, parameter and input that forward changes, except the statistics of a BatchNorm."""
    import torch

    signature = program.graph_signature
    # torch's exporter does not report that an instance_norm with its input's statistics updates the running ones
    norms = [node for node in program.graph.nodes if node.target is torch.ops.aten.instance_norm.default]
    moved = [str(one) for node in norms if node.args[5] for one in node.args[3:5]]
    own = {signature.inputs_to_buffers[one]: True for one in moved if one in signature.inputs_to_buffers}
    for name in dict.fromkeys([*own, *signature.buffers_to_mutate.values()]):
        owner = module.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, torch.nn.modules.batchnorm._BatchNorm) and name not in own:
            continue
        fact = f"the forward of {type(owner).__name__} changes this buffer"
        yield Problem(f"'{name}'", fact, _NO_WRITES, _REMEDY_OF_WRITES)
    for name in dict.fromkeys(getattr(signature, "parameters_to_mutate", {}).values()):
        owner = module.get_submodule(name.rpartition(".")[0])
        fact, help_ = (
            f"the forward of {type(owner).__name__} changes this parameter",
            "compute a changed value as another tensor",
        )
        if getattr(owner, "max_norm", None) is not None:
            fact, help_ = f"{fact} (max_norm = {owner.max_norm})", "leave max_norm out"
        yield Problem(f"'{name}'", fact, "a parameter of the exported graph is changed by its optimizer alone", help_)
    for name in dict.fromkeys(signature.user_inputs_to_mutate.values()):
        law = "the exported graph changes no input"
        yield Problem(f"input '{name}'", "forward changes its input in place", law, "clone it first")


def mark_gradients(model: ir.Model) -> list[Problem]:
    """Marks nodes whose gradient in torch is not that of their op (`GRADIENT_FORM`); returns a problem for each gradient that no op has.

    It also works on a file that `torch.onnx.export` wrote: its nodes' metadata name the torch calls that they come from.
    """
    problems = []
    for node in nodes_of(model.graph):
        call = node.metadata_props.get(_CALL, "")
        if node.op_type == "Gather" and (embedding := _EMBEDDING.search(call)) is not None:
            padding, scaled, _, options = embedding.groups()
            if padding is not None and int(padding) >= 0:
                node.metadata_props[GRADIENT_FORM] = f"padding_row {padding}"
            if scaled == "True" or "scale_grad_by_freq: True" in options:
                weight = node.inputs[0].name if node.inputs[0] is not None else ""
                fact = "its embedding divides gradients by the frequency of ids (scale_grad_by_freq)"
                law = "the exported graph has the lookup alone, whose gradient is not divided"
                problems.append(Problem(f"'{weight}'", fact, law, "leave scale_grad_by_freq out"))
        elif node.op_type == "Clip" and _OPEN_BOUNDS.search(call) and all(node.inputs[:3]) and len(node.inputs) == 3:
            node.metadata_props[GRADIENT_FORM] = "inside"
        elif node.op_type in ("ReduceMax", "ReduceMin") and (extreme := _EXTREME.search(call)) is not None:
            node.metadata_props[GRADIENT_FORM] = f"first {extreme[1]}"
    return problems


def write_problems_into(model: ir.Model, problems: Sequence[Problem]) -> None:
    """Writes into the model's metadata why its training would differ from the module's, and the buffers that forward changes."""
    if problems:
        import json

        texts = [[one.where, one.fact, one.law, one.help] for one in dict.fromkeys(problems)]
        model.metadata_props[UNTRAINABLE] = json.dumps(texts)
    if changed := dict.fromkeys(one.where for one in problems if one.law == _NO_WRITES):
        model.metadata_props[CHANGED_BY_FORWARD] = ", ".join(changed)


class Observer:
    """Tracks every function of torch that forward calls: which tensors depend on parameters, and which calls query or change gradients.

    `complete`: whether it has observed a forward to its end.
    """

    def __init__(self, module: torch.nn.Module, recorder: Recorder) -> None:
        import torch
        from torch.utils.weak import WeakTensorKeyDictionary

        self.module, self.problems, self.complete = module, list[Problem](), False
        self._paths = {id(one): path for path, one in module.named_modules()}
        self._recorder = recorder
        self._dependent, self._aliases = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        tensor = torch.Tensor
        hooks = ("register_hook", "register_post_accumulate_grad_hook")
        self._hooks: dict[object, str] = {getattr(tensor, name): name for name in hooks}
        self._asks: dict[object, Callable[[bool], object]] = {
            tensor.requires_grad.__get__: bool,  # type: ignore[attr-defined]
            tensor.is_leaf.__get__: lambda follows: not follows,  # type: ignore[attr-defined]
        }

    @contextmanager
    def attributes(self) -> Iterator[None]:
        """Compares the buffers and numbers of all modules before and after a forward.

        A trace misses these changes: `self.center = ...` assigns another tensor, and `self.calls += 1` becomes a constant.
        """
        before = {path: _attributes(one) for path, one in self.module.named_modules()}
        yield
        self.complete = True
        for path, module in self.module.named_modules():
            for name, value in _attributes(module).items():
                old = before.get(path, {}).get(name, value)
                if value is old or (isinstance(value, int | float) and value == old):
                    continue
                kind = "number" if isinstance(value, int | float) else "buffer"
                fact = f"the forward of {type(module).__name__} changes this {kind}"
                self.problems.append(Problem(_where(f"{path}.{name}".lstrip(".")), fact, _NO_WRITES, _REMEDY_OF_WRITES))

    def answers(self, func: object, args: Sequence[Any]) -> bool:
        """Whether `answer` must give the result of a call, since autograd would answer it.

        Calls from torch's own code are not answered: torch would look for recorded gradients, and there are none in a trace.
        """
        if func in self._hooks:
            return self._depends(args[0])
        if func not in self._asks or isinstance(args[0], _parameter()) or not self._depends(args[0]):
            return False
        asks = sys._getframe(2).f_globals.get("__name__", "")
        return asks != "torch" and not asks.startswith("torch.")

    def answer(self, func: object, args: Sequence[Any]) -> object:
        """Returns the result that autograd would give; a registration of a hook becomes a problem."""
        if func in self._asks:
            return self._asks[func](True)
        fact = f"forward registers a hook of a tensor's gradient (Tensor.{self._hooks[func]})"
        self.problems.append(Problem(self._line(), fact, _NO_HOOKS, _REMEDY_OF_HOOKS))
        return _Handle()

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: object, off: bool) -> None:
        """Tracks one call and its result; `off`: forward has turned gradients off.

        A change in place of a tensor that depends on parameters, while gradients are off, becomes a problem.
        """
        from torch import Tensor
        from torch.utils._pytree import tree_leaves

        name = getattr(func, "__name__", "")
        operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if _changes(name) and operands:
            target = operands[0]
            if (off and self._depends(target) and not isinstance(target, _parameter())) or target in self._aliases:
                law = "its gradient is the one before the change, which the exported graph does not have"
                fact = f"forward changes a tensor with a gradient in place ({name}) where gradients are off"
                help_ = "change a copy: y = torch.where(..., x.detach(), x), or (f(x) - x).detach() + x"
                self.problems.append(Problem(self._line(), fact, law, help_))
        depends = any(map(self._depends, operands))
        if not depends:
            return
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if off or name == "detach":
                if not any(tensor is other for other in operands):
                    self._aliases[tensor] = True
            else:
                self._dependent[tensor] = True
        if name == "detach_" and operands[0] in self._dependent:
            del self._dependent[operands[0]]
        if name == "__setitem__" and not off:
            self._dependent[operands[0]] = True

    def detached(self, args: Sequence[Any], made: object) -> None:
        """Tracks the result of `x.data`, which changes with `x` and has no gradient."""
        if self._depends(args[0]):
            self._aliases[made] = True

    def _depends(self, tensor: object) -> bool:
        from torch import Tensor

        if not isinstance(tensor, Tensor):
            return False
        return bool(tensor.requires_grad) if isinstance(tensor, _parameter()) else tensor in self._dependent

    def _line(self) -> str:
        """Returns the user's line that is running, else the path of the module whose forward runs."""
        frame, path = sys._getframe(1), ""
        while frame is not None:
            file = frame.f_code.co_filename
            if self._recorder.owns(file):
                return self._recorder.line(file, frame.f_lineno)
            path = path or self._paths.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back  # type: ignore[assignment]
        return _where(path)


def _attributes(module: torch.nn.Module) -> dict[str, object]:
    """Returns a module's buffers and its numeric attributes; not those of `transformers`' modules, which are sizes that they have seen."""
    found: dict[str, object] = dict(module._buffers)
    if not type(module).__module__.startswith("transformers."):
        found |= {name: one for name, one in vars(module).items() if type(one) in (int, float)}
    return found


class _Handle:
    """The handle that a registration of a hook returns."""

    def remove(self) -> None:
        """Removes nothing: no hook was registered."""


def _where(path: str) -> str:
    return f"'{path}'" if path else "the module"


def _changes(name: str) -> bool:
    """Whether the torch function of this name changes its first tensor in place."""
    if name in ("requires_grad_", "detach_", "share_memory_"):
        return False
    return name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__"))


def _parameter() -> type:
    from torch.nn import Parameter

    return Parameter
