"""Ops of ai.onnx.ml: shapes and types as onnxruntime makes them, classifiers with texts for labels, and models with maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import rule_cases_tabular as tabular
from equivalence import same_as_whole
from onnx import TensorProto, helper
from partc.compiler.analysis.infer_shapes import infer_shapes
from partc.compiler.dims.facts import Facts
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.ops.registry import entries
from partc.runtime.artifact.dim_expression import parse
from rule_case import feeds_of, node_of, run
from rule_prover import Case

ML = tabular.ML


def inferred(this: Case, feeds: dict[str, np.ndarray[Any, Any]], dynamic: bool) -> list[tuple[tuple[int, ...], str]]:
    """The shapes and types of a node's outputs, by the compiler's rules; with `dynamic`, its first dim is a symbol."""
    node = node_of(this, feeds=feeds)
    for value in node.outputs:
        value.shape = value.type = None
    first = node.inputs[0]
    assert first is not None
    assert first.shape is not None
    if dynamic:
        first.shape = ir.Shape(["n", *first.shape.dims[1:]])
    assert node.graph is not None
    assert infer_shapes(ir.Model(node.graph, ir_version=10), {"n": Facts(min=1)}) == {}
    bound = {"n": len(feeds["x0"])}
    return [
        (
            tuple(parse(dim if isinstance(dim, int) else str(dim.value), ["n"])(bound) for dim in out.shape or ()),
            str(out.dtype),
        )
        for out in node.outputs
    ]


@pytest.mark.parametrize("case", tabular.CASES, ids=str)
def test_shapes_and_types_are_those_of_onnxruntime(case: Case) -> None:
    feeds = feeds_of(case)
    made = run([node_of(case, feeds=feeds)], feeds, {}, case)
    types = [ir.DataType.STRING if one.dtype.kind in "OU" else ir.DataType.from_numpy(one.dtype) for one in made]
    want = [(one.shape, str(kind)) for one, kind in zip(made, types, strict=True)]
    assert inferred(case, feeds, False) == want
    if np.ndim(case.operands[0]) != 1 and len(feeds["x0"].shape) > 1:
        assert inferred(case, feeds, True) == want
        single = {**feeds, "x0": feeds["x0"][0]} if case.op_type != "FeatureVectorizer" else feeds
        alone = run([node_of(case, feeds=feeds)], single, {}, case)
        assert [shape for shape, _ in inferred(case, single, False)] == [one.shape for one in alone]


def test_every_op_of_the_domain_has_an_entry() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ML}
    assert {entry.op_type for entry in entries() if entry.domain == ML} == known


DP = "ranks: 2\nmesh: {dp: 2}\nsymbols: {n: {divisor: 2}}\ndataset: data_parallel\n"
LABELS = ["no", "yes", "perhaps", "late"]


def classifier(this: Case, count: int) -> onnx.ModelProto:
    """A model of a classifier whose labels are texts."""
    named = {name: value for name, value in this.attributes.items() if not name.startswith("classlabels")}
    node = helper.make_node(
        this.op_type, ["x"], ["label", "scores"], domain=ML, classlabels_strings=LABELS[:count], **named
    )
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", tabular.X[1]])
    label = helper.make_tensor_value_info("label", TensorProto.STRING, None)
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ML, 3)]
    return helper.make_model(
        helper.make_graph([node], "g", [given], [label, scores]), opset_imports=opsets, ir_version=9
    )


BINARY_TREE = {**tabular.TREE, **tabular.leaves("class", [0, 0, 0, 0, 0])}
"""A tree of two classes with the scores of one."""
CLASSIFIERS = [
    *(
        (case, next(len(v) for k, v in case.attributes.items() if "classlabels" in k))
        for case in tabular.CASES
        if case.outputs == 2
    ),
    (tabular.case("TreeEnsembleClassifier", [tabular.X], BINARY_TREE, domain=ML, outputs=2), 2),
]


@pytest.mark.parametrize(("case", "count"), CLASSIFIERS, ids=str)
def test_a_classifier_that_names_its_classes_is_cut_by_rows(case: Case, count: int) -> None:
    model = classifier(case, count)
    feeds = {"x": 3 * np.random.default_rng(5).standard_normal((12, tabular.X[1])).astype("float32")}
    program = same_as_whole(model, DP, feeds, rtol=1e-6, atol=1e-6, checked=True)
    assert program.warnings == ()
    cut = {place.node.op_type: choice.axes for place, choice in program.choices.items()}
    assert cut[case.op_type] == {"n": (0,)}


def of_ports(kind: str, port: onnx.ValueInfoProto, node: onnx.NodeProto) -> onnx.ModelProto:
    tensor = helper.make_tensor_value_info("t", TensorProto.FLOAT, ["n", 2])
    ports = ([port], [tensor]) if kind == "input" else ([tensor], [port])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ML, 3)]
    return helper.make_model(helper.make_graph([node], "g", *ports), opset_imports=opsets, ir_version=9)


def test_maps_are_refused_by_name() -> None:
    value = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    a_map = helper.make_map_type_proto(TensorProto.INT64, value)
    maps = helper.make_value_info("m", helper.make_sequence_type_proto(a_map))
    made = helper.make_node("ZipMap", ["t"], ["m"], name="zip", domain=ML, classlabels_int64s=[0, 1])
    taken = helper.make_node("CastMap", ["m"], ["t"], name="cast", domain=ML)
    plain = helper.make_node("SequenceLength", ["m"], ["t"])
    one = helper.make_value_info("m", a_map)
    for model, said in (
        (
            of_ports("output", maps, made),
            "ZipMap 'zip' makes a sequence of maps\n.*\n  help: export it without: options={'zipmap'",
        ),
        (of_ports("input", one, taken), "CastMap 'cast' takes maps\n.*\n  help: fit the model on arrays"),
        (of_ports("input", maps, plain), "input 'm' is a map\n"),
    ):
        with pytest.raises(CompileError, match=said):
            from_proto(model, Path("model.onnx"))


def test_texts_stay_where_they_are_made() -> None:
    """Texts are not sent: what is computed of them is on a rank of theirs, and what is numbers is sent."""
    nodes = [
        helper.make_node("LabelEncoder", ["city"], ["id"], domain=ML, keys_strings=["a", "b"], values_int64s=[0, 1]),
        helper.make_node("OneHotEncoder", ["city"], ["hot"], domain=ML, cats_strings=["a", "b"], zeros=1),
        helper.make_node("LabelEncoder", ["id"], ["back"], domain=ML, keys_int64s=[0, 1], values_strings=["A", "B"]),
    ]
    given = [helper.make_tensor_value_info("city", TensorProto.STRING, ["n", 2])]
    kinds = {"back": TensorProto.STRING, "hot": TensorProto.FLOAT, "id": TensorProto.INT64}
    made = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ML, 3)]
    model = helper.make_model(helper.make_graph(nodes, "g", given, made), opset_imports=opsets, ir_version=9)
    feeds = {"city": np.array([["a", "b"], ["b", "c"], ["a", "a"], ["b", "b"]], object)}
    same_as_whole(model, DP, feeds, rtol=0, atol=0)
    placed = 'ranks: 2\nplacement: {"LabelEncoder_0": 1, "LabelEncoder_1": 0}\n'
    same_as_whole(model, placed, feeds, rtol=0, atol=0)
