"""The rules of the op table as rules of batching: every case of the prover over several records is what it is record by record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnxscript import GraphBuilder
from partc.compiler.nn.batching import Batch, NotBatchedError
from rows import of_today
from rule_case import Array, Case, feeds_of, node_of, opsets_of, run
from rules_case import CASES

RECORDS = 3
OLDEST = 18
"""The opset from which axes are operands, as in the models that vmap is for."""
REFUSED = ("draws inside", "in training", "as long as its numbers", "differs by record")


def batched(this: Case, places: Sequence[int]) -> Counter[str] | None:
    """The ops of a case in which these operands differ by record; None where vmap refuses it. The results are compared."""
    feeds = feeds_of(this)
    records = [{f"x{k}": _other(feeds[f"x{k}"], turn) for k in places} for turn in range(RECORDS)]
    try:
        wanted = [run([node_of(this)], {**feeds, **one}, {}, this) for one in records]
    except Exception:  # operands that go together, such as sizes and what they are of
        return None
    node, graph = node_of(this), ir.Graph([], [], nodes=[], opset_imports=opsets_of(this), name="batch")
    builder = GraphBuilder(graph)
    batch = Batch(builder.op, RECORDS)
    given = dict[str, Array]()
    for k, value in enumerate(node.inputs):
        if value is None:
            continue
        name = f"x{k}"
        array = np.stack([one[name] for one in records]) if k in places else feeds[name]
        port = ir.Value(name=name, type=value.type, shape=ir.Shape(array.shape))
        if k in this.constants:
            port.const_value = ir.tensor(array, name=name)
            graph.register_initializer(port)
            batch.values[value] = port
            continue
        graph.inputs.append(port)
        given[name] = array
        if k in places:
            batch.take(value, port)
        else:
            batch.values[value] = port
    try:
        batch.node(node)
    except NotBatchedError as error:
        if any(why in str(error) for why in REFUSED):
            return None
        raise
    for record in node.outputs:
        graph.outputs.append(builder.op.Identity(batch.spread(record)))
    proto = ir.serde.serialize_model(ir.Model(graph, ir_version=10))
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for k, made in enumerate(session.run(None, given)):
        want = np.stack([one[k] for one in wanted])
        assert made.shape == want.shape
        scale = float(np.abs(want[np.isfinite(want)]).max(initial=1.0)) if want.dtype.kind == "f" else 1.0
        np.testing.assert_allclose(made, want, rtol=1e-4, atol=this.close * scale)
    return Counter(one.op_type for one in graph)


def _other(array: Array, turn: int) -> Array:
    """Numbers of another record, legal where these are."""
    return np.roll(array, turn, axis=0) if array.ndim else array


def test_rules_batch() -> None:
    """Most by a letter of their rule, with all operands from record to record, or one alone; the others in a Scan."""
    forms: dict[str, Counter[str]] = {}
    for this in of_today(CASES, len(CASES) // 4):
        if this.opset < OLDEST or this.domain == "ai.onnx.ml" or "ceil_mode" in this.attributes:
            continue  # onnxruntime infers other shapes than it makes where sizes are rounded up
        places = [k for k, one in enumerate(this.operands) if one is not None and k not in this.constants]
        for chosen in dict.fromkeys([tuple(places), *((k,) for k in places)] if places else []):
            made = batched(this, chosen)
            form = "refused" if made is None else "Scan" if made["Scan"] else "letter"
            forms.setdefault(this.op_type, Counter()).update([form])
    assert len([name for name, found in forms.items() if not found["Scan"]]) > 25
    assert sum(found["letter"] for found in forms.values()) > 60
