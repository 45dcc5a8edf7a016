"""One planted fault for each op of the table: the checker refuses it, whatever the op is.

All ops stand in one model, each with an operand that is a sum over a cut dim. Then each reduction is left out, as if the compiler had
forgotten it: the op reads a term of a sum, or passes it on to an output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from check_places_case import without_any
from equivalence import compiled
from mutated import texts
from onnx import NodeProto, TensorProto, helper, numpy_helper
from partc.compiler.ops.registry import entry_of_op
from rule_case import OPSETS, Case, feeds_of
from rules_case import CASES

OPSET = 23


def planted() -> Iterator[Case]:
    """The first case of each op that reads floating-point numbers of one dim at least, and has factors."""
    done = set()
    for this in CASES:
        entry, key = entry_of_op(this.domain, this.op_type), (this.domain, this.op_type)
        says = entry is not None and entry.notation.factors and entry.notation.keeps_dims
        if says and key not in done and this.op_type not in NEWER and first_term(this) is not None:
            done.add(key)
            yield this


NEWER = ("Upsample", "Scatter", "TreeEnsembleClassifier", "TreeEnsembleRegressor")
"""Ops that the opsets of the one model do not have."""


def first_term(this: Case) -> int | None:
    """The first operand that may be a sum: floating-point numbers that are no constant."""
    feeds = feeds_of(this)
    there = (k for k in range(len(this.operands)) if f"x{k}" in feeds and k not in this.constants)
    return next((k for k in there if feeds[f"x{k}"].dtype == np.float32 and feeds[f"x{k}"].ndim), None)


def nodes_of(this: Case, at: int, graph: onnx.GraphProto) -> Iterator[NodeProto]:
    """The op's node, its operands as inputs of the graph, and the sum that makes one of them."""
    feeds, term = feeds_of(this), first_term(this)
    names = ["" if one is None else f"x{k}_{at}" for k, one in enumerate(this.operands)]
    for k, name in enumerate(names):
        if not name:
            continue
        array = feeds[f"x{k}"]
        if k in this.constants:
            graph.initializer.append(numpy_helper.from_array(array, name))
            continue
        if k == term:
            graph.initializer.append(numpy_helper.from_array(np.stack([array, array]), f"{name}_terms"))
            yield helper.make_node("Mul", [f"{name}_terms", "scale"], [f"{name}_scaled"], f"scaled{at}")
            yield helper.make_node("ReduceSum", [f"{name}_scaled", "first"], [name], f"sum{at}", keepdims=0)
            continue
        kind = TensorProto.STRING if array.dtype.kind in "OU" else helper.np_dtype_to_tensor_dtype(array.dtype)
        graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    made = [f"y{at}_{k}" for k in range(this.outputs)]
    yield helper.make_node(this.op_type, names, made, f"op{at}", domain=this.domain, **this.attributes)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By op what the checker says of the fault that is planted for it."""
    cases = [*planted()]
    graph = onnx.GraphProto(name="every_op")
    graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))
    graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, [1]))
    plan = "ranks: 2\nsharding:\n"
    for at, this in enumerate(cases):
        graph.node.extend(nodes_of(this, at, graph))
        rank = feeds_of(this)[f"x{first_term(this)}"].ndim
        plan += f"  sum{at}: {{in: [{[2, *[1] * rank]}, null]}}\n"
    opsets = [helper.make_opsetid(*one) for one in {"": OPSET, **OPSETS}.items()]
    folder = tmp_path_factory.mktemp("every_op") / "build"
    compiled(helper.make_model(graph, opset_imports=opsets, ir_version=10), plan, folder, check=False)
    without_any(folder)
    said = texts(folder).splitlines()
    return {
        str(this): "\n".join([line for line in said if re.search(rf"\b(op{at}|y{at}_\d+)\b", line)])
        for at, this in enumerate(cases)
    }


def test_a_sum_that_is_not_reduced_is_told_whatever_reads_it(found: dict[str, str]) -> None:
    assert [op for op, said in found.items() if "that no collective has reduced" not in said] == []
    assert len(found) > 150
