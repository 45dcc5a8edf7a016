"""Ops of ai.onnx.ml, which exports of scikit-learn, LightGBM and XGBoost consist of: each row of an input is a record, computed by itself.

An input of rank 1 is one record, whose only dim is its features: nothing of it is sharded.

    X [records, features]   TreeEnsembleClassifier   ->   labels [records], scores [records, classes]
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.ops.node import dims, operand, rank_of
from partc.compiler.ops.notation import rule
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import WHOLE, Rule

DOMAIN = "ai.onnx.ml"

op(
    "LinearRegressor",
    "SVMRegressor",
    "TreeEnsemble",
    "TreeEnsembleRegressor",
    domain=DOMAIN,
    factors="n.->n.",
    kernel="function",
)
op(
    "LinearClassifier",
    "SVMClassifier",
    "TreeEnsembleClassifier",
    domain=DOMAIN,
    factors="n.->n,n.",
    kernel="function",
)
op("Imputer", "Normalizer", "Scaler", domain=DOMAIN, factors="n._->n._")
op("Binarizer", "CategoryMapper", "LabelEncoder", domain=DOMAIN, factors="*->*")
op("OneHotEncoder", domain=DOMAIN, factors="*->*.")
op("FeatureVectorizer", domain=DOMAIN, factors="n.,...->n.", linear="joint", kernel="layout")
extractor = op("ArrayFeatureExtractor", domain=DOMAIN, factors="*.,k->*k", linear="each", partial=(0,), kernel="lookup")
op("CastMap", "DictVectorizer", "ZipMap", domain=DOMAIN, why="maps are not tensors; a model that has them is refused")


@extractor.sharding
def _(node: ir.Node) -> Rule | None:
    """Indices count as one list, which is cut where only its first dim is not 1; one record is 1 row of the output."""
    count, indices = rank_of(node.inputs[0]), dims(operand(node, 1))
    if count is None or indices is None:
        return None
    places = [k for k, dim in enumerate(indices) if dim != 1]
    cut = places[0] if len(places) == 1 else None
    letters = "".join("k" if k == cut else WHOLE for k in range(len(indices)))
    made = "k" if cut is not None else WHOLE
    return rule(node, f".,{letters}->.{made}" if count == 1 else f"*.,{letters}->*{made}")
