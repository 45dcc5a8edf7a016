"""A torch module with the inputs of its export, so that it can be run for comparison with its exported graph.

`export` stores it in the graph's `meta`, under `TORCH_MODEL`. A run does not change the module: forward gets copies of its buffers.
Dropout is off, since torch and a graph draw different numbers.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

import onnx_ir as ir
from partc.compiler.dims.symbol import Symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.inputs import Spec
from partc.runtime.artifact.tensors.dtypes import Array

if TYPE_CHECKING:
    import torch

TORCH_MODEL = "partc.torch_model"
"""Key of `ir.Model.meta`: the `TorchModel` that the graph was exported from, or a function that builds it."""
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
"""Functions of torch that drop; each also has an in-place form, with an underscore."""

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
Seen: TypeAlias = "Callable[[str, torch.nn.Module, list[torch.Tensor]], None]"
"""A callback for each module that has run: its path, the module, and the tensors that it returned."""


@dataclass(frozen=True)
class TorchModel:
    """A module and its inputs in order. `outputs` maps each output of the graph to its index among the tensors that forward returns.

    `sizes`: the dynamic dims' sizes in the export. `arguments`: forward's names for the inputs, empty where it takes them by position.
    `stored`: the tensors of a module that was exported without its weights.
    """

    module: torch.nn.Module
    inputs: Sequence[Spec]
    symbols: Mapping[str, Symbol]
    outputs: Mapping[str, int]
    sizes: Mapping[str, int]
    arguments: Sequence[str]
    where: str
    stored: Mapping[str, ir.TensorProtocol] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Maps names to parameters and buffers, those in `stored` read from there; buffers are copies."""
        import torch

        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        named = {**dict(self.module.named_parameters(remove_duplicate=False)), **buffers}
        names = {id(named[name]): name for name in self.stored if name in named}  # a tied weight is read once
        read = {key: torch.from_numpy(self.stored[name].numpy()) for key, name in names.items()}
        copies = {id(one): one.detach().clone() for one in buffers.values() if id(one) not in read}
        known = {**read, **copies}
        return {name: known.get(id(tensor), tensor) for name, tensor in named.items()}

    def call(self, tensors: Tensors | None, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Runs forward; returns its outputs by the graph's names. `tensors` replace the module's own parameters and buffers."""
        import torch
        from torch.utils import _pytree

        given = [values[spec.name] for spec in self.inputs]
        kwargs = dict(zip(self.arguments, given, strict=True)) if self.arguments else {}
        args = () if self.arguments else tuple(given)
        own, forward = {**(tensors or {})}, self.module
        made = torch.func.functional_call(forward, own, args, kwargs) if own else forward(*args, **kwargs)
        leaves = _pytree.tree_leaves(made)
        return {name: leaves[place] for name, place in self.outputs.items()}

    def run(self, values: Mapping[str, Array], seen: Seen | None = None) -> dict[str, Array]:
        """Runs forward on arrays; returns its outputs by name. `seen` gets the results of each of its modules."""
        import torch

        with quiet(), without_gradients(), without_dropout(self.module), _watched(self.module, seen):
            tensors = self.tensors()
            device = next((one.device for one in tensors.values()), None)
            given = {name: torch.from_numpy(array.copy()).to(device) for name, array in values.items()}
            return {name: one.detach().cpu().numpy() for name, one in self.call(tensors, given).items()}


def torch_model_of(model: ir.Model) -> TorchModel | None:
    """Returns the module that a graph was exported from; None where partc did not export it in this process."""
    found = model.meta.get(TORCH_MODEL)
    if callable(found):
        found = model.meta[TORCH_MODEL] = found()
    return found if isinstance(found, TorchModel) else None


def called_as(torch_model: TorchModel, model: ir.Model, where: str) -> TorchModel:
    """Renames the module's inputs and outputs to those of another graph of it: the same names, or others in the same order.

    Raises CompileError where there are more or fewer.
    """
    inputs = _matched([spec.name for spec in torch_model.inputs], [value.name or "" for value in model.graph.inputs])
    outputs = _matched([*torch_model.outputs], [value.name or "" for value in model.graph.outputs])
    if inputs is None or outputs is None:
        own = f"{', '.join(spec.name for spec in torch_model.inputs)} and gives {', '.join(torch_model.outputs)}"
        names = [", ".join(value.name or "" for value in some) for some in (model.graph.inputs, model.graph.outputs)]
        fact = f"the module takes {own}; the graph takes {names[0]} and gives {names[1]}"
        raise CompileError(Problem(where, fact, help="name the same inputs and outputs in the model.py"))
    named = [replace(spec, name=inputs[spec.name]) for spec in torch_model.inputs]
    places = {outputs[name]: place for name, place in torch_model.outputs.items() if name in outputs}
    return replace(torch_model, inputs=named, outputs=places)


def _matched(ours: Sequence[str], others: Sequence[str]) -> dict[str, str] | None:
    """Maps each of our names to the other file's name: the same name where it has it, else by order; None where the numbers differ."""
    if set(others) <= set(ours):
        return {name: name for name in others}
    return dict(zip(ours, others, strict=True)) if len(ours) == len(others) else None


@contextmanager
def quiet() -> Iterator[None]:
    """A context without the logs and warnings of torch's exporter and `transformers` about unused modules and their own internals."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def without_gradients() -> Iterator[None]:
    """A context without gradients, in which a `with torch.no_grad()` has no effect: else torch makes it a call, and loses its modules.

    Attention layers would then use inference kernels that are not ops of ONNX: these are off, too.
    """
    import torch

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def without_dropout(module: torch.nn.Module) -> Iterator[None]:
    """A context in which no element is dropped, neither by layers nor by functions that a module in training calls."""
    import torch
    from torch.nn import functional

    attention = functional.scaled_dot_product_attention

    def undropped(*args: Any, **kwargs: Any) -> Any:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return attention(*args, **{**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})

    with ExitStack() as stack:
        for owner in (torch._VF, torch):
            for name in (*_DROPOUTS, *(f"{name}_" for name in _DROPOUTS)):
                stack.enter_context(mock.patch.object(owner, name, lambda x, p, train: x, create=True))
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", undropped))
        for one in module.modules():
            if isinstance(one, torch.nn.RNNBase) and one.dropout:
                stack.enter_context(mock.patch.object(one, "dropout", 0.0))
        yield


@contextmanager
def _watched(module: torch.nn.Module, seen: Seen | None) -> Iterator[None]:
    from torch.utils import _pytree

    if seen is None:
        yield
        return
    hooks = []
    for path, submodule in module.named_modules(remove_duplicate=False):

        def told(inside: torch.nn.Module, given: object, made: object, path: str = path) -> None:
            leaves = [leaf for leaf in _pytree.tree_leaves(made) if hasattr(leaf, "detach")]
            seen(path, inside, [leaf.detach().clone() for leaf in leaves])

        hooks.append(submodule.register_forward_hook(told))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
