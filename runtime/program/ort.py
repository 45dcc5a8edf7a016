"""The part of onnxruntime that the runtime uses, with types: onnxruntime's own Python layer has no types, and is slow to import."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, cast

from partc.runtime.artifact.tensors.dtypes import BY_NAME, Array

from ..devices.devices import HOST, Device
from ..errors import reason_of

Bind: TypeAlias = Callable[[str, str, int, int, tuple[int, ...], int], None]
"""The arguments: name, device, device number, ONNX number of the element type, shape, address."""


class OrtValue(Protocol):
    """A tensor that onnxruntime owns."""

    def element_type(self) -> int: ...
    def shape(self) -> list[int]: ...
    def data_ptr(self) -> int: ...


class Binding(Protocol):
    """Binds the inputs and outputs of a session to memory."""

    bind_input: Bind

    @property
    def bind_output(self) -> Callable[..., None]: ...
    def get_outputs(self) -> list[OrtValue]: ...


class Described(Protocol):
    """An output of a session."""

    name: str
    type: str


class Session(Protocol):
    """A model that is ready to run."""

    def io_binding(self) -> Binding: ...
    def run_with_iobinding(self, binding: Binding) -> None: ...
    def run(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]: ...
    def get_outputs(self) -> list[Described]: ...
    def get_providers(self) -> list[str]: ...
    def end_profiling(self) -> str: ...
    def get_profiling_start_time_ns(self) -> int: ...
    def get_provider_graph_assignment_info(self) -> list[Any]: ...


_ROUNDS_OTHERWISE = (
    "ConvAddActivationFusion",
    "DivMulFusion",
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "MatMulScaleFusion",
    "SimplifiedLayerNormFusion",
    "TransposeOptimizer",
    "TransposeOptimizer_CPUExecutionProvider",
)
"""Optimizations of onnxruntime that change how nodes round, depending on the nodes around them.

(1 / x) * y becomes y / x if an operand is a constant; a factor of float64 before a MatMul becomes one of float32; a sum over a transposed
value uses another order where that value has no other reader.
"""


@functools.cache
def _one_arena(device: Device, doubles: bool = False) -> bool:
    """Whether onnxruntime has one arena on a device for all sessions of this process that request it; else each has its own memory.

    With `doubles` the arena doubles when it grows, else it grows by the requested size. A process has one of the two.
    """
    import onnxruntime

    ((provider, options),) = device.providers
    kinds, devices = onnxruntime.OrtAllocatorType, onnxruntime.OrtMemType
    try:
        name = "Cpu" if device.is_host else "Cuda"
        memory = onnxruntime.OrtMemoryInfo(name, kinds.ORT_ARENA_ALLOCATOR, device.number, devices.DEFAULT)
        settings = onnxruntime.OrtArenaCfg(0, 0 if doubles else 1, -1, -1)
        if device.is_host:
            onnxruntime.create_and_register_allocator(memory, settings)
        else:
            number = {"device_id": options["device_id"]}
            onnxruntime.create_and_register_allocator_v2(provider, memory, number, settings)
    except Exception:
        return False  # another arena is registered already, with other settings, or this onnxruntime has none
    return True


NO_FALLBACK = "session.disable_cpu_ep_fallback"
_ASSIGNED = "session.record_ep_graph_assignment_info"


def new_session(
    model: bytes,
    threads: int,
    device: Device,
    entries: Mapping[str, str],
    exact: bool = False,
    grows: bool = False,
    profile: str = "",
    numbers: Mapping[str, Array] = MappingProxyType({}),
    tables: Collection[str] = (),
    doubles: bool = False,
    large: bool = False,
) -> Session:
    """Returns a session with all optimizations and without a memory arena of its own; `entries` are session options by name.

    All sessions share one arena: steps with the same sizes reuse the same pages, and one session reuses memory that another has freed.
    Nodes run in the order of the model, which is that of the rank file.

    With `exact` nodes round as they would alone. So ranks that each compute a copy of a value get the same bits, also if an operand is a
    constant on one rank and an input on another, or if one rank sends an intermediate value.

    With `grows` values inside are a little larger in each step, like the part of a decoder's cache that is read. The common arena asks the
    system for exactly the requested size, so none of its freed pieces would fit the next step, and it would grow by all of them in each
    step; such a session has an arena of its own, which doubles each time. With `doubles`, too, all such sessions of the process have one.

    With `profile` onnxruntime notes when each node runs; `end_profiling` returns the path of the file, which begins with `profile`.

    On a GPU, `NO_FALLBACK` among the entries forbids nodes on the CPU; without it `left_on_host` lists them.

    With `large` onnxruntime does not plan which values share a buffer, which takes it time quadratic in the number of nodes: of 4,000 small
    ones 2.5 of 3.3 s. The common arena gives freed memory again, so steps take as long and as much memory; without that arena it plans.

    `numbers`: by name the weights that are not read from a file. The session does not copy those named in `tables`, and keeps the array.

    Its threads are its own: onnxruntime's pool for all sessions would belong to the whole process, and the user's sessions would have to be
    configured for it.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    shared = (doubles or not grows) and _one_arena(HOST if device.is_host else device, grows)
    options.enable_cpu_mem_arena = device.is_host and (shared or grows)
    if shared or grows:
        options.enable_mem_pattern = False
    options.enable_mem_reuse = not (large and shared and device.is_host)
    if shared:
        options.add_session_config_entry("session.use_env_allocators", "1")
    if not device.is_host:
        options.use_deterministic_compute = exact
        options.add_session_config_entry(_ASSIGNED, "1")
    # Every failure is raised with its text; onnxruntime would print it a second time.
    options.log_severity_level = 4
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    values = {name: _value_of(array) for name, array in numbers.items()}
    if values:
        options.add_external_initializers([*values], [*values.values()])
    for name in tables:
        options.add_initializer(name, values[name])
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    left_out = list(_ROUNDS_OTHERWISE) if exact else None
    session = onnxruntime.InferenceSession(
        model, options, providers=device.providers, disabled_optimizers=left_out, enable_fallback=0
    )
    session.tables = [(numbers[name], values[name]) for name in tables]  # onnxruntime points to them
    ((provider, _),) = device.providers
    if provider not in session.get_providers():
        # onnxruntime only logs that it has not found the device, and takes the CPU.
        raise RuntimeError(f"onnxruntime cannot use {device}: its {provider} was not made")
    return cast(Session, session)


def _value_of(array: Array) -> Any:
    """Returns a tensor of onnxruntime over the memory of an array, also of bfloat16, which numpy lacks."""
    import onnxruntime

    if array.dtype.name == "bfloat16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view("u2"), BY_NAME["bfloat16"].code)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def give_back_freed() -> None:
    """Returns memory that creating sessions has freed to the system; weights that it computes take twice their size meanwhile."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def left_on_host(session: Session) -> list[tuple[str, str]]:
    """Returns (op, name) of each node of a session on a GPU that onnxruntime runs on the CPU."""
    parts = session.get_provider_graph_assignment_info()
    return [(node.op_type, node.name) for part in parts if part.ep_name.startswith("CPU") for node in part.get_nodes()]


def without_kernel(model: bytes, device: Device, entries: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns (op, name) of each node of a model, without optimizations, for which there is no kernel on a GPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name, value in {**entries, NO_FALLBACK: "0", _ASSIGNED: "1"}.items():
        options.add_session_config_entry(name, value)
    session = onnxruntime.InferenceSession(model, options, providers=device.providers, enable_fallback=0)
    return left_on_host(cast(Session, session))


def can_load(model: bytes, folder: str, *, optimized: bool) -> str:
    """Returns the reason why onnxruntime does not load a model, "" if it does. External weights are in `folder`; nothing is run."""
    try:
        if model:
            quiet_session(model, folder, optimized=optimized, entries={"session.disable_prepacking": "1"})
    except Exception as error:
        return reason_of(error)
    return ""


def quiet_session(
    model: bytes | Path,
    folder: str = "",
    *,
    threads: int = 1,
    optimized: bool = True,
    entries: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Returns onnxruntime's own session of a model on the CPU, which prints no warnings. External weights are in `folder`.

    Without `optimized` no kernel replaces several nodes. `threads`: 0 for as many as there are cores.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if threads:
        options.intra_op_num_threads = threads
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    more = {"session.model_external_initializers_file_folder_path": folder} if folder else {}
    for name, value in {**entries, **more}.items():
        options.add_session_config_entry(name, value)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def new_value(shape: tuple[int, ...], code: int) -> OrtValue:
    """Returns a tensor in onnxruntime's memory, not initialized."""
    import onnxruntime

    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, code)
    return cast(OrtValue, value)


def version() -> str:
    """The version of onnxruntime."""
    import onnxruntime

    return str(onnxruntime.__version__)
