"""The regions of the graph to which `place` and `shard` of a module, a function or an op apply: the nodes that its calls emit.

The region of a module is all nodes inside of it. The region of a function is the nodes that one call of it emits: they get a scope of the
function's name (`dense_relu.MatMul`; in a second call in the same module `dense_relu_1.MatMul`), and so do nodes of modules that it calls.
The region of an op is its node. If `place` and `shard` both name a function, they share one region.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder
from partc.compiler.directives.calls import Region, TracedCall, bound_op
from partc.compiler.directives.recorder import Recorder, recorder
from partc.compiler.directives.torch_calls import call_in_torch, has_tensors
from partc.compiler.errors import CompileError, Problem
from partc.compiler.plan.target import is_default_device, named_target
from partc.runtime.spellings import first_free, numbered


def wrong_device(device: object, where: str) -> Iterator[Problem]:
    """Yields a problem for a value that is not a kind of device."""
    if not is_default_device(device) and not named_target(device):
        law = "a device is 'cpu' or 'cuda', or 'Ascend' for the job's"
        yield Problem(where, f"device is {device!r}", law, "write 'cpu', or leave it out")


_vmaps: ContextVar[tuple[str, ...]] = ContextVar("partc_vmaps", default=())
"""The lines of the calls of `vmap` whose functions are being called, the outermost first."""


@contextmanager
def within_vmap(where: str) -> Iterator[None]:
    """A context in which a function of one record is called, for the `vmap` at the line `where`."""
    token = _vmaps.set((*_vmaps.get(), where))
    try:
        yield
    finally:
        _vmaps.reset(token)


def _refuse_in_vmap(call: TracedCall, name: str) -> None:
    """Raises CompileError for a call inside of a function of one record, in which the dim of the records is hidden."""
    if _vmaps.get():
        fact = f"'{name}' is called inside of vmap, at {_vmaps.get()[-1]}"
        law = f"the tensors of a {call.verb} are those of all records, and inside of vmap a dim is hidden"
        raise CompileError(Problem(call.where, fact, law, f"{call.verb} a function that calls vmap"))


def note_call(module: object, arguments: Sequence[object], result: object) -> None:
    """Records the inputs and outputs of a traced module, if `shard` was called on it."""
    record = recorder()
    for call in record.shards if record else ():
        if call.target is module:
            _refuse_in_vmap(call, call.name)
            region = Region("", None, _tensors(arguments), _tensors([result]))
            call.check(region)
            call.regions.append(region)


_TRACED: WeakKeyDictionary[Callable[..., object], tuple[tuple[TracedCall, ...], Callable[..., object]]] = (
    WeakKeyDictionary()
)


def traced(call: TracedCall, target: Callable[..., object]) -> Callable[..., object]:
    """Returns the function or op to call instead of `target`; the nodes that a call of it emits are a region of `call`."""
    earlier, fn = _TRACED.get(target, ((), target)) if inspect.isfunction(target) else ((), target)
    calls = (*earlier, call)
    call.target = fn
    bound = bound_op(fn)

    def call_traced(*arguments: object, **named: object) -> object:
        if not bound and has_tensors(arguments, named):
            return call_in_torch(calls, fn, arguments, named, recorder())
        op = bound[0] if bound else arguments[0] if arguments else None
        if not isinstance(op, OpBuilder):
            fact = f"'{call.name}' is called without the op builder"
            law = "the region of a function is what it emits: its first argument is the op builder of forward, or tensors of torch"
            help = "call it with op first"
            raise CompileError(Problem(call.where, fact, law, help))
        builder, record = op.builder, recorder()
        _refuse_in_vmap(call, call.name)
        if record and builder.parent is not None:
            fact = f"'{call.name}' is called in a body of If, Loop or Scan, whose ops run whole"
            raise CompileError(Problem(call.where, fact, help=f"{call.verb} what is outside of it"))
        operands = _tensors([*arguments, *named.values()])
        with _scope(builder, None if bound else call.name, record) as path:
            before = builder.graph.num_nodes()
            result = fn(*arguments, **named)
        results = _tensors([result])
        if record:
            if builder.graph.num_nodes() == before:
                fact = f"'{call.name}' emits no op"
                raise CompileError(Problem(call.where, fact, help=f"{call.verb} what computes"))
            region = Region(path, results[0].producer() if bound else None, operands, results)
            for each in calls:
                each.check(region)
                each.regions.append(region)
        return result

    found = functools.wraps(fn)(call_traced)
    _TRACED[found] = calls, fn
    return found


@contextmanager
def within_scope(builder: GraphBuilder, name: str) -> Iterator[None]:
    """A context in which nodes get a scope of this name."""
    scopes = ([""] if not builder._scope_names() else []) + [name]
    for scope in scopes:
        builder.push_module(scope)
    try:
        yield
    finally:
        for _ in scopes:
            builder.pop_module()


@contextmanager
def _scope(builder: GraphBuilder, name: str | None, record: Recorder | None) -> Iterator[str]:
    """A context in which nodes get a scope of this name, distinct from earlier calls'; yields its path without the root's name."""
    around = [part for part in builder._scope_names()[1:] if part]
    if name is None:
        yield ".".join(around)
        return
    calls = (*record.shards, *record.calls) if record else ()
    taken = {region.path for call in calls for region in call.regions if region.node is None}
    path = first_free(".".join([*around, name]), taken.__contains__, numbered)
    with within_scope(builder, path.rpartition(".")[2]):
        yield path


def _tensors(values: Sequence[object]) -> tuple[ir.Value, ...]:
    tensors: list[ir.Value] = []
    for value in values:
        match value:
            case ir.Value():
                tensors.append(value)
            case list() | tuple():
                tensors += _tensors(value)
            case Mapping():
                tensors += _tensors(list(value.values()))
    return tuple(tensors)
