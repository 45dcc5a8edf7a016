"""Shapes and types of the ops of ai.onnx.ml, which the engine does not know: as onnxruntime makes them.

An input of one dim is one record. Scores are float32 whatever the features are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.dims.facts import Facts

Known = Mapping[str, Facts]
_STRING, _FLOAT, _INT64 = ir.DataType.STRING, ir.DataType.FLOAT, ir.DataType.INT64


def scores(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is None:
        return
    counted = {"SVMRegressor": "", "LinearRegressor": "targets"}.get(node.op_type, "n_targets")
    dtype = x.dtype if node.op_type == "TreeEnsemble" else _FLOAT
    ctx.set_shape_and_dtype(node.outputs[0], _rows(x, int(node.attributes.get_int(counted, 1) or 1)), dtype)


def classes(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is None:
        return
    texts = node.attributes.get_strings("classlabels_strings")
    kinds = (_STRING if texts else _INT64, _FLOAT)
    for out, shape, dtype in zip(node.outputs, (_rows(x), _rows(x, _class_count(ctx, node))), kinds, strict=False):
        ctx.set_shape_and_dtype(out, shape, dtype)


def _class_count(ctx: ShapeInferenceContext, node: ir.Node) -> int | ir.SymbolicDim:
    """The columns of a classifier's scores: an SVM without probabilities has one for each pair of classes."""
    names = ("classlabels_strings", "classlabels_ints", "classlabels_int64s")
    labels = max((len(node.attributes[name].value) for name in names if name in node.attributes), default=0)
    match node.op_type:
        case "SVMClassifier":
            listed = node.attributes.get_ints("vectors_per_class") or ()
            if not listed or node.attributes.get_floats("prob_a"):
                return labels or ctx.new_symbolic_dim()
            pairs = len(listed) * (len(listed) - 1) // 2
            return 2 if pairs == 1 else pairs
        case "LinearClassifier":
            terms = len(node.attributes.get_floats("intercepts") or ()) or labels
            return 2 if terms == 1 and labels == 2 else terms or ctx.new_symbolic_dim()
        case _:
            return labels or ctx.new_symbolic_dim()


def by_feature(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is not None:
        ctx.set_shape_and_dtype(node.outputs[0], x.shape, x.dtype if node.op_type == "Imputer" else _FLOAT)


def by_element(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is not None:
        ctx.set_shape_and_dtype(node.outputs[0], x.shape, _mapped_type(node, x.dtype))


def _mapped_type(node: ir.Node, dtype: ir.DataType | None) -> ir.DataType | None:
    """The output type of an elementwise map: that of the attribute that lists the values."""
    if node.op_type == "Binarizer":
        return dtype
    listed = {"values_strings": _STRING, "values_int64s": _INT64, "values_floats": _FLOAT}
    for name, kind in listed.items():
        if name in node.attributes:
            return kind
    if "values_tensor" in node.attributes:
        return node.attributes["values_tensor"].as_tensor().dtype
    return _INT64 if dtype == _STRING else _STRING  # CategoryMapper, and LabelEncoder of version 1


def one_hot(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x = node.inputs[0]
    if x is None:
        return
    listed = [node.attributes[name].value for name in ("cats_int64s", "cats_strings") if name in node.attributes]
    count = max(map(len, listed), default=0)
    shape = None if x.shape is None else ir.Shape([*x.shape.dims, count])
    ctx.set_shape_and_dtype(node.outputs[0], shape, _FLOAT)


def feature_vectorizer(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x, counts = node.inputs[0], node.attributes.get_ints("inputdimensions") or ()
    if x is not None:
        ctx.set_shape_and_dtype(node.outputs[0], _rows(x, sum(counts)) if counts else None, _FLOAT)


def array_feature_extractor(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    x, indices = node.inputs[0], node.inputs[1]
    if x is None or indices is None:
        return
    if x.shape is None or indices.shape is None:
        ctx.set_shape_and_dtype(node.outputs[0], None, x.dtype)
        return
    count: int | ir.SymbolicDim = 1
    for dim in indices.shape.dims:
        count = dim if count == 1 else count if dim == 1 else _times(ctx, count, dim)
    rows = [1] if len(x.shape) == 1 else [*x.shape.dims[:-1]]
    ctx.set_shape_and_dtype(node.outputs[0], ir.Shape([*rows, count]), x.dtype)


def _times(ctx: ShapeInferenceContext, one: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    return one * other if isinstance(one, int) and isinstance(other, int) else ctx.new_symbolic_dim()


def _rows(x: ir.Value, *columns: int | ir.SymbolicDim) -> ir.Shape | None:
    """The shape of a result computed per record; an input of one dim is one record."""
    if x.shape is None:
        return None
    return ir.Shape([1 if len(x.shape) == 1 else x.shape[0], *columns])


TABULAR = {
    ("ai.onnx.ml", op_type): rule
    for rule, op_types in {
        scores: ("LinearRegressor", "SVMRegressor", "TreeEnsemble", "TreeEnsembleRegressor"),
        classes: ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"),
        by_feature: ("Imputer", "Normalizer", "Scaler"),
        by_element: ("Binarizer", "CategoryMapper", "LabelEncoder"),
        one_hot: ("OneHotEncoder",),
        feature_vectorizer: ("FeatureVectorizer",),
        array_feature_extractor: ("ArrayFeatureExtractor",),
    }.items()
    for op_type in op_types
}
