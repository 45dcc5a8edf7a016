"""Calls of the functions that `shard` or `place` targets, in the forward of a torch model.

While torch traces the model each tensor that enters such a function goes through a marker, and each that leaves it through another one:

    h = partc.region::Enter(x) {call: 0, place: 0}
    ...                                               what the function computes
    y = partc.region::Leave(h2) {call: 0, place: 0}

`frontend/torch/function_regions.py` reads the regions off the exported graph and takes the markers out. Regions of `shard` do not nest, and
none is called inside of `torch.func.vmap`, where a tensor has fewer dims than its strategy; `vmap` inside of a region is as any code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from partc.compiler.directives.calls import ShardCall, TracedCall
from partc.compiler.directives.recorder import Recorder, TorchCall
from partc.compiler.errors import CompileError, Problem

if TYPE_CHECKING:
    pass

DOMAIN = "partc.region"
"""The domain of the markers `Enter` and `Leave`, each with the attributes `call` and `place`."""


def has_tensors(arguments: Sequence[object], named: Mapping[str, object]) -> bool:
    """Whether a call has tensors of torch among its arguments."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    from torch.utils import _pytree

    return any(isinstance(one, torch.Tensor) for one in _pytree.tree_leaves((arguments, named)))


def call_in_torch(
    calls: tuple[TracedCall, ...],
    fn: Callable[..., object],
    arguments: Sequence[object],
    named: Mapping[str, object],
    record: Recorder | None,
) -> object:
    """The result of `fn`; while a load exports the model what it computes is a region of `calls`.

    Raises CompileError where regions of `shard` nest, where it is called inside of `torch.func.vmap`, and where torch is too old.
    """
    import torch
    from torch.utils import _pytree

    if record is None or not torch.compiler.is_compiling():
        return fn(*arguments, **named)
    call = calls[-1]
    if not hasattr(torch.onnx, "ops"):
        fact = f"'{call.name}' is called by a torch model, and torch {torch.__version__} exports no marks of its region"
        raise CompileError(Problem(call.where, fact, help=f"use torch 2.8 or later, or {call.verb} a module"))
    leaves, spec = _pytree.tree_flatten((tuple(arguments), dict(named)))
    if any(isinstance(one, torch.Tensor) and torch._C._functorch.is_batchedtensor(one) for one in leaves):
        fact = f"'{call.name}' is called inside of torch.func.vmap"
        law = f"the tensors of a {call.verb} are those of all records, and inside of vmap a dim is hidden"
        raise CompileError(Problem(call.where, fact, law, f"{call.verb} a function that calls vmap"))
    own = TorchCall(calls, call.name)
    number = len(record.torch_calls)
    record.torch_calls.append(own)
    with _within(record, own):
        marked = [_marked("Enter", number, one, own.arguments) for one in leaves]
        given, by_name = _pytree.tree_unflatten(marked, spec)
        made, made_spec = _pytree.tree_flatten(fn(*given, **by_name))
    if not any(isinstance(one, torch.Tensor) for one in made):
        raise CompileError(Problem(call.where, f"'{call.name}' returns no tensor", help=f"{call.verb} what computes"))
    return _pytree.tree_unflatten([_marked("Leave", number, one, own.results) for one in made], made_spec)


@contextmanager
def _within(record: Recorder, own: TorchCall) -> Iterator[None]:
    """Inside of a call; CompileError where a region of `shard` would be in another one."""
    inner = next((one for one in own.calls if isinstance(one, ShardCall)), None)
    outer = next((one for around in record.under_way for one in around.calls if isinstance(one, ShardCall)), None)
    if inner is not None and outer is not None:
        fact = f"shard of '{inner.name}' is inside of '{outer.name}', which {outer.where} shards"
        help = "shard one of the two; the plan's 'sharding' may speak of the other"
        raise CompileError(Problem(inner.where, fact, "regions of shard do not nest", help))
    record.under_way.append(own)
    try:
        yield
    finally:
        record.under_way.pop()


def _marked(op: str, number: int, value: Any, shapes: list[tuple[object, ...]]) -> Any:
    """A tensor behind a marker, whose dims are added to `shapes`; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    attributes: dict[str, Any] = {"call": number, "place": len(shapes)}
    shapes.append(tuple(value.shape))
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{op}", (value,), attributes, dtype=value.dtype, shape=value.shape, version=1
    )
