"""The ops of `partc.comm` as ONNX knows ops: their schemas, and a numpy reference that runs over any transport.

With the schemas registered, `onnx.checker` checks a rank file in full. With `reference_ops(transport)`,
`onnx.reference.ReferenceEvaluator` executes it, node by node and without onnxruntime: slow, plain, and another witness of
what the file means.

    ReferenceEvaluator(model, new_ops=reference_ops(transport)).run(None, {"x": x})
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.defs
from onnx.defs import OpSchema
from onnx.reference.op_run import OpRun

from .dtypes import BY_NAME, Array, by_numpy
from .format import DOMAIN, DOMAIN_VERSION, PEER, RECV, SEND, TAG
from .message import HEADER, Value, decode, encode, payload_size
from .tensor import Tensor, aligned
from .transport import Transport

_ENDS = (
    (PEER, "The rank at the other end."),
    (TAG, "The number that both ends of one transfer carry, and no other transfer."),
)


def schemas() -> list[OpSchema]:
    """The schemas of Send and Recv: a value of any type, a peer and a tag."""
    anything = ("T", _types(), "Whatever a value can be.")
    attributes = [OpSchema.Attribute(name, OpSchema.AttrType.INT, text, required=True) for name, text in _ENDS]
    send = OpSchema(
        SEND,
        DOMAIN,
        DOMAIN_VERSION,
        doc="Sends a value to another rank; the value stays as it is.",
        inputs=[OpSchema.FormalParameter("X", "T", "The value.")],
        type_constraints=[anything],
        attributes=attributes,
    )
    recv = OpSchema(
        RECV,
        DOMAIN,
        DOMAIN_VERSION,
        doc="Receives a value from another rank; its type and shape stand in the graph's value_info.",
        outputs=[OpSchema.FormalParameter("Y", "T", "The value.")],
        type_constraints=[anything],
        attributes=attributes,
    )
    return [send, recv]


def register() -> None:
    """Make the schemas known to onnx; a second time changes nothing."""
    for schema in schemas():
        if not onnx.defs.has(schema.name, domain=schema.domain):
            onnx.defs.register_schema(schema)


def reference_ops(transport: Transport) -> list[type[OpRun]]:
    """Send and Recv for `onnx.reference.ReferenceEvaluator`, over a transport whose other ends run the same reference."""

    class Send(OpRun):
        op_domain = DOMAIN

        def _run(self, x: Any, peer: int = 0, tag: int = 0) -> tuple[Any]:
            for part in encode(_sent(x)):
                transport.wait(transport.isend(part, peer, tag), lambda: f"Send to rank {peer}")
            # The evaluator wants a result, and gives it no name.
            return (x,)

    class Recv(OpRun):
        op_domain = DOMAIN

        def _run(self, peer: int = 0, tag: int = 0) -> tuple[Any]:
            def received(size: int) -> Any:
                buffer = aligned(size)
                transport.wait(transport.irecv(buffer, peer, tag), lambda: f"Recv from rank {peer}")
                return buffer

            header = received(HEADER)
            value = decode(header, received(payload_size(header)))
            return (value.array() if isinstance(value, Tensor) else value,)

    return [Send, Recv]


def _sent(value: Any) -> Value:
    dtype = by_numpy(value.dtype) if isinstance(value, np.ndarray | np.generic) else None
    array: Array = np.asarray(value)
    return Tensor.of(array, dtype) if dtype else value


def _types() -> list[str]:
    tensors = [f"tensor({name})" for name in (*BY_NAME, "string")]
    sequences = [f"seq({tensor})" for tensor in tensors]
    return [*tensors, *sequences, *(f"optional({one})" for one in (*tensors, *sequences))]
