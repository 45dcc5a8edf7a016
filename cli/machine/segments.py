"""Measures the segments of artifacts: each runs in its rank's sessions, on values as in a step.

The segments of a step run in order, several times, so that each finds the caches as it does in a step. Inputs are random, as those of
`partc run --random`. Values from other ranks are small floats, and integers in the range of those that the rank itself sends, since sorting
and looking up take longer for ids than for zeros.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from partc.cli.job.inputs import open_inputs
from partc.cli.machine.kernels import clock_of, undisturbed
from partc.compiler.cost.actions import digest
from partc.compiler.cost.sizes import FileSizes
from partc.runtime.artifact.manifest import Artifact, open_artifact
from partc.runtime.artifact.tensors.dtypes import dense
from partc.runtime.artifact.tensors.tensor import Tensor
from partc.runtime.communication.transport import Transport
from partc.runtime.execution.inputs import shard
from partc.runtime.execution.rank_program import lower_rank_program, settings_for
from partc.runtime.program.rank_file import read_rank_file
from partc.runtime.program.session_values import from_ort
from partc.runtime.program.sessions import SegmentSession
from partc.runtime.program.steps import Segment, StartCollective

_SECONDS, _MOST, _WARM = 4.0, 30, 2
"""The limits of the passes over one file: the most seconds, the most passes, and the number of warm-up passes."""
_SEED = 7


def segment_times(
    artifacts: Sequence[dict[str, Any]], transport: Transport, threads: int, longer: float
) -> dict[str, float]:
    """Maps digests to the seconds of segments, for the files of this rank's share.

    `longer`: the additional seconds of a session's run in a step, where more work than other segments lies between two runs.
    """
    times: dict[str, float] = {}
    for entry in artifacts:
        artifact = open_artifact(Path(entry["folder"]), trust=True)
        files = [ranks[0] for ranks in artifact.manifest.by_file(range(artifact.manifest.ranks)).values()]
        own = files[transport.rank :: transport.size]
        if not own:
            own = files[:1]  # it keeps its core as busy as the others do
        transport.all_gather_text("")
        for rank in own:
            sizes = FileSizes(read_rank_file(artifact, rank), entry["sizes"])
            program = lower_rank_program(artifact, rank, settings_for(transport, threads, None))
            runs: dict[str, Callable[[], object]] = {}
            cells = _inputs(artifact, rank, sizes)
            for index, step in enumerate(program.steps):
                if isinstance(step, StartCollective):
                    source, result = step.call.source or "", step.call.result or ""
                    if (made := received(cells.get(source), _value(result, sizes))) is not None:
                        cells[result] = made
                elif isinstance(step, Segment):
                    run, key = _bound(program.runners[index], sizes, cells), digest(step, sizes)
                    runs |= {key: run} if run is not None and key not in runs else {}
            times |= {key: taken + longer for key, taken in _timed(runs, threads)}
    return times


def _timed(runs: dict[str, Callable[[], object]], threads: int) -> Iterator[tuple[str, float]]:
    """Yields the seconds of each segment, run one after the other."""
    taken: dict[str, list[float]] = defaultdict(list)
    clock, begun = clock_of(threads), time.perf_counter()
    for passes in range(_MOST + _WARM):
        if passes > _WARM and time.perf_counter() - begun >= _SECONDS:
            break
        for key, run in runs.items():
            start = clock()
            run()
            taken[key].append(clock() - start)
    for key, times in taken.items():
        yield key, undisturbed(times[_WARM:] or times)


def _bound(runner: SegmentSession, sizes: FileSizes, cells: dict[str, Tensor]) -> Callable[[], object] | None:
    """Returns a function that runs a segment once on the results of earlier segments and values of its own.

    Returns None where the segment takes values that are not tensors of known sizes, or fails on them.
    """
    segment = runner.segment
    if runner.objects:
        return None
    binding, held = runner.session.io_binding(), list[Tensor]()
    for bind, some in ((binding.bind_input, segment.operands), (binding.bind_output, segment.output_pairs)):
        for formal, name in some:
            tensor = cells.get(name) or _value(name, sizes)
            if tensor is None:
                return None
            cells[name] = tensor
            held.append(tensor)
            if name not in sizes.merged:
                bind(formal, "cpu", 0, tensor.dtype.code, tensor.shape, tensor.pointer)
    merged = [formal for formal, name in segment.output_pairs if name in sizes.merged]
    of_merged = [name in sizes.merged for name in segment.outputs]

    def run() -> list[Tensor]:
        for formal in merged:  # as in a step, since the number of rows is known only at run time
            binding.bind_output(formal, "cpu")
        runner.session.run_with_iobinding(binding)
        for value, is_merged in zip(binding.get_outputs(), of_merged, strict=True) if merged else ():
            if is_merged:
                from_ort(value, None)
        return held

    try:
        run()
    except Exception:
        return None
    return run


def _inputs(artifact: Artifact, rank: int, sizes: FileSizes) -> dict[str, Tensor]:
    """Returns this rank's shards of random inputs that are tensors of known sizes."""
    tensors, reader = dict[str, Tensor](), open_inputs(artifact.manifest, [], _SEED, sizes.sizes)
    for port in artifact.manifest.inputs:
        if rank not in port.ranks or (tensor := _value(port.name, sizes)) is None:
            continue
        array = shard(port, rank, reader.read([port.name])[port.name])
        if isinstance(array, np.ndarray) and array.shape == tensor.shape:
            tensor.array()[...] = array
            tensors[port.name] = tensor
    return tensors


def received(given: Tensor | None, result: Tensor | None) -> Tensor | None:
    """Fills the result of a collective with random integers in the range of this rank's own operand; None for any other type."""
    if given is None or result is None or given.dtype != result.dtype:
        return None
    some, array = given.array(), result.array()
    if not some.size or some.dtype.kind not in "iu":
        return None
    array[...] = np.random.default_rng(0).integers(some.min(), some.max(), array.shape, some.dtype, endpoint=True)
    return result


def _value(name: str, sizes: FileSizes) -> Tensor | None:
    """Returns a tensor of a value's type and sizes, with small floats or integer zeros; None where these are not known."""
    dtype, shape = dense(sizes.types.get(name, "")), sizes.operand(name).sizes
    if dtype is None or shape is None:
        return None
    tensor = Tensor.empty(dtype, shape)
    array = tensor.array()
    array[...] = 0
    if array.dtype.kind == "f":
        array[...] = np.random.default_rng(0).standard_normal(shape) * 0.1
    return tensor
