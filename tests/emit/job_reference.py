"""A reference interpreter of a job: its ops in order on all ranks in one process, before any rank program or file is written.

A node is one onnxruntime session, which runs once for ranks whose operands are the same arrays; a message hands its value on; a
collective is its numpy reference. So a fault of `lower` or of a pass before it shows here, and one of emit or of the runtime does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from partc.compiler.emit.helper_types import node_proto
from partc.compiler.emit.weights import WeightShards
from partc.compiler.ir.constants import Constant, RankConstant
from partc.compiler.ir.programs import Comm, Compute, State, Value
from partc.compiler.ir.sharded import ShardedValue, members
from partc.compiler.lower.job import Transfer
from partc.compiler.lower.local_view import Localized
from partc.compiler.training.optimizer_functions import functions
from partc.runtime.artifact import dim_expression
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.comm.collectives import COLLECTIVES, LOOKUPS
from partc.runtime.artifact.tensors.boxes import merge, slices
from partc.runtime.artifact.tensors.law import full_tensor
from reference_ops import collected, pulled, pushed

Given = tuple[Comm, list[Any]]
"""What a rank gives to a collective: its op, and the operands."""


class JobRun:
    """A step of a program that has passed `update`: `at` has the values of its job by value and rank."""

    def __init__(self, program: Localized) -> None:
        self.program, self.local, self.job = program, program.local, program.local.comm.job
        self.at: dict[tuple[Value, int], Any] = {}
        self._sessions: dict[tuple[Compute, bytes], onnxruntime.InferenceSession] = {}
        self._weights = WeightShards()
        self._shards: dict[tuple[int, ...], Any] = {}

    def __call__(self, inputs: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
        """Runs a step over `inputs`, which are whole; `numbers` are what it is given besides."""
        at, job = self.at, self.job
        at.clear()
        self._shards.clear()
        for one, version, ranks in job.inputs:
            at |= {(one, rank): self.shard(version, rank, inputs[str(version.value.name)]) for rank in members(ranks)}
        for one, held, ranks in job.weights:
            at |= dict.fromkeys([(one, rank) for rank in members(ranks)], self._weights.of(held).tensor.numpy())
        for one, state, ranks in job.state:
            at |= {(one, rank): self._first(state, rank) for rank in members(ranks) if (one, rank) not in at}
        for one, _, ranks in job.scalars:
            at |= dict.fromkeys([(one, rank) for rank in members(ranks)], numbers[str(one)])
        for one, constant, ranks in job.constants:
            at |= {(one, rank): self._constant(constant, rank) for rank in members(ranks)}
        events = {event.tag: {*sum(event.ranks, ())} for event in self.local.comm.events}
        waiting: dict[int, dict[int, Given]] = {}
        for step, ranks in job.program:
            if isinstance(step, Compute):
                self._compute(step, members(ranks))
                continue
            if isinstance(step, Transfer):
                ends = zip(step.sources, step.targets, strict=True)
                at |= {(step.moved, target): at[step.moved, source] for source, target in ends}
                continue
            given = waiting.setdefault(step.tag, {})
            given |= {r: (step, [None if v is None else at[v, r] for v in step.inputs]) for r in members(ranks)}
            if given.keys() == events[step.tag]:
                made = {
                    r: zip(given[r][0].outputs, some, strict=False) for r, some in self._communicated(given).items()
                }
                at |= {(one, rank): found for rank, some in made.items() for one, found in some if one is not None}

    def shard(self, version: ShardedValue, rank: int, whole: Any) -> Any:
        """A rank's shard of a whole value; ranks of one shard have one array."""
        if not any(version.layout.cuts):
            return whole
        box = version.layout.box(version.places[rank], whole.shape)
        return self._shards.setdefault((id(whole), *sum(box, ())), whole[tuple(slice(*one) for one in box)])

    def _first(self, state: State, rank: int) -> Any:
        of = state.value.of or state.version.value
        assert of.dtype is not None
        shape = state.value.shape or ir.Shape(of.shape or ()).numpy()
        if not isinstance(state.initial, fmt.Law):
            return np.full(shape, state.initial, of.dtype.numpy())
        return self.shard(state.version, rank, full_tensor(state.initial, of.shape.numpy(), of.dtype.numpy()))

    def _constant(self, constant: Constant, rank: int) -> Any:
        if not isinstance(constant, RankConstant):
            return constant
        place = next(one.index(rank) for one in self.local.comm.groups[constant.group] if rank in one)
        numbers = [dim_expression.parse(item)({fmt.PLACE: place}) for item in constant.items]
        return np.array(numbers, np.int64).astype(constant.dtype).reshape(constant.shape)

    def _compute(self, step: Compute, ranks: Sequence[int]) -> None:
        known: dict[tuple[int, ...], list[Any]] = {}
        read = {str(k): one for k, one in enumerate(step.inputs) if one is not None} | dict(step.captured)
        for rank in ranks:
            operands = {name: self.at[one, rank] for name, one in read.items()}
            key = tuple(map(id, operands.values()))
            if key not in known:
                ports = [_port(name, read[name], array) for name, array in operands.items()]
                results = self._session(step, ports).run(None, operands)
                known[key] = [np.asarray(one) if isinstance(one, np.generic) else one for one in results]
            self.at |= {(one, rank): found for one, found in zip(step.makes, known[key], strict=True)}

    def _session(self, step: Compute, inputs: list[onnx.ValueInfoProto]) -> onnxruntime.InferenceSession:
        key = step, b"".join(one.SerializeToString() for one in inputs)
        if key not in self._sessions:
            outputs = [f"out{k}" if one else "" for k, one in enumerate(step.outputs)]
            node = node_proto(step, [str(k) if one else "" for k, one in enumerate(step.inputs)], outputs)
            opsets = dict(self.program.model.opset_imports) | {fmt.OPTIMIZER: 1}
            graph = onnx.GraphProto(name="op", node=[node], input=inputs)
            graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs if name)
            own = functions([node.op_type], opsets[""]) if node.domain == fmt.OPTIMIZER else []
            imports = [onnx.helper.make_opsetid(*one) for one in opsets.items()]
            model = onnx.ModelProto(ir_version=11, graph=graph, functions=own, opset_import=imports)
            options = onnxruntime.SessionOptions()
            options.log_severity_level, options.intra_op_num_threads = 4, 1
            self._sessions[key] = onnxruntime.InferenceSession(model.SerializeToString(), options)
        return self._sessions[key]

    def _communicated(self, given: Mapping[int, Given]) -> dict[int, Sequence[Any]]:
        """By rank the results of a collective."""
        step = next(iter(given.values()))[0]
        if step.op_type == fmt.EXCHANGE:
            return {rank: _received(rank, given) for rank in given}
        found: dict[int, Sequence[Any]] = {}
        for ranks in self.local.comm.groups[str(step.attributes[fmt.GROUP])]:
            for place, rank in enumerate(ranks):
                said = {fmt.ROW: (), **given[rank][0].attributes}
                if step.op_type in LOOKUPS:
                    rows = [(*given[one][1], *[None] * (4 - len(given[one][1]))) for one in ranks]
                    found[rank] = (pulled if step.op_type == fmt.PULL else pushed)(rows, place, said)
                    continue
                op = COLLECTIVES[step.op_type]
                givers = [ranks[int(said[fmt.ROOT])]] if op.root == "gives" else ranks
                columns = zip(*[given[one][1] for one in givers], strict=True)
                found[rank] = [collected(op, column, place, said) for column in columns]
        return found


def _received(rank: int, given: Mapping[int, Given]) -> Sequence[Any]:
    """What a rank has behind an Exchange: the boxes that come, those of each other rank in its order."""
    shards = {
        peer: [
            given[peer][1][0][slices(box, given[peer][1][0].shape)] for to, box in _boxes(step, "send") if to == rank
        ]
        for peer, (step, _) in given.items()
    }
    taken = [(box, shards[peer].pop(0)) for peer, box in _boxes(given[rank][0], "recv")]
    return [merge(*map(list, zip(*taken, strict=True)))] if taken else []


def _boxes(step: Comm, way: str) -> list[tuple[int, Any]]:
    said: Mapping[str, Any] = step.attributes
    peers = said[f"{way}_peers"]
    return list(zip(peers, np.reshape(said[f"{way}_boxes"], (len(peers), said[fmt.RANK], 3)).tolist(), strict=True))


def _port(name: str, value: Value, array: Any) -> onnx.ValueInfoProto:
    """An input of a node: its type is that of the array, else of the value."""
    port = ir.serde.serialize_value(value.of) if value.of is not None else onnx.ValueInfoProto()
    port.name = name
    if isinstance(array, np.ndarray):
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        port.type.CopyFrom(onnx.helper.make_tensor_type_proto(kind, [None] * array.ndim))
    return port
