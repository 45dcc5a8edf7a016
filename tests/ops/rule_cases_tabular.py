"""Ops of ai.onnx.ml: rows are records."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto
from rule_case import Case, case

ML = "ai.onnx.ml"
X = (12, 3)
TREE = {
    "nodes_treeids": [0] * 5 + [1] * 3,
    "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
    "nodes_featureids": [0, 0, 1, 0, 0, 2, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "BRANCH_LT", "LEAF", "LEAF", "BRANCH_GT", "LEAF", "LEAF"],
    "nodes_values": [0.1, 0.0, -0.4, 0.0, 0.0, 0.6, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 3, 0, 0, 1, 0, 0],
    "nodes_falsenodeids": [2, 0, 4, 0, 0, 2, 0, 0],
}


def leaves(kind: str, ids: list[int]) -> dict[str, list[int] | list[float]]:
    """The attributes of the leaves of `TREE`."""
    name = "class" if kind == "class" else "target"
    return {
        f"{name}_treeids": [0, 0, 0, 1, 1],
        f"{name}_nodeids": [1, 3, 4, 1, 2],
        f"{name}_ids": ids,
        f"{name}_weights": [0.5, 0.25, -1.0, 2.0, 0.75],
    }


def svm(classes: int, vectors: int, **more: object) -> dict[str, object]:
    """The attributes of a classifier by so many support vectors a class."""
    rng = np.random.default_rng(classes)
    pairs, total = classes * (classes - 1) // 2, classes * vectors
    return {
        "coefficients": rng.standard_normal(total * (classes - 1)).tolist(),
        "support_vectors": rng.standard_normal(total * X[1]).tolist(),
        "vectors_per_class": [vectors] * classes,
        "rho": rng.standard_normal(pairs).tolist(),
        "kernel_type": "RBF",
        "kernel_params": [0.25, 0.0, 3.0],
        "classlabels_ints": [*range(classes)],
        **more,
    }


SPLITS = onnx.helper.make_tensor("splits", TensorProto.FLOAT, (2,), [0.1, -0.4])
ENSEMBLE = {
    "n_targets": 2,
    "aggregate_function": 1,
    "post_transform": 0,
    "tree_roots": [0],
    "nodes_modes": onnx.helper.make_tensor("modes", TensorProto.UINT8, (2,), [0, 1]),
    "nodes_featureids": [0, 1],
    "nodes_splits": SPLITS,
    "nodes_truenodeids": [0, 1],
    "nodes_trueleafs": [1, 1],
    "nodes_falsenodeids": [1, 2],
    "nodes_falseleafs": [0, 1],
    "leaf_targetids": [0, 1, 0],
    "leaf_weights": onnx.helper.make_tensor("weights", TensorProto.FLOAT, (3,), [1.0, 2.0, 0.5]),
}
INDICES = (np.arange(72) % 5 - 1).reshape(6, 12)
THREE = {"coefficients": [0.5, -1.0, 0.25] * 3, "intercepts": [0.1, -0.2, 0.3]}
CASES: list[Case] = [
    case("ArrayFeatureExtractor", [(12, 6)], constants={1: [[0, 2, 2, 5, 1, 3]]}, domain=ML),
    case("ArrayFeatureExtractor", [(6,), np.abs(INDICES[0]).reshape(12, 1)], domain=ML),
    case("ArrayFeatureExtractor", [(12, 6)], constants={1: 4}, domain=ML),
    case("Binarizer", [(6, 12)], {"threshold": 0.5}, domain=ML),
    case("CategoryMapper", [INDICES], {"cats_int64s": [0, 1], "cats_strings": ["a", "b"]}, domain=ML),
    case("FeatureVectorizer", [X, (12, 2)], {"inputdimensions": [3, 2]}, domain=ML),
    case("Imputer", [X], {"imputed_value_floats": [1.0, 2.0, 3.0], "replaced_value_float": 0.0}, domain=ML),
    case("LabelEncoder", [INDICES], {"keys_int64s": [0, 1], "values_floats": [0.5, 2.0]}, domain=ML),
    case("LinearClassifier", [X], {**THREE, "classlabels_ints": [3, 4, 7]}, domain=ML, outputs=2),
    case(
        "LinearClassifier",
        [X],
        {"coefficients": [0.5, -1.0, 0.25], "intercepts": [0.1], "classlabels_strings": ["no", "yes"]},
        domain=ML,
        outputs=2,
    ),
    case("LinearRegressor", [X], {**THREE, "targets": 3}, domain=ML),
    case("Normalizer", [X], {"norm": "L2"}, domain=ML),
    case("OneHotEncoder", [INDICES], {"cats_int64s": [0, 1, 3], "zeros": 1}, domain=ML),
    case("SVMClassifier", [X], svm(2, 2), domain=ML, outputs=2),
    case("SVMClassifier", [X], svm(4, 1), domain=ML, outputs=2),
    case("SVMClassifier", [X], svm(3, 1, prob_a=[-1.0] * 3, prob_b=[0.1] * 3), domain=ML, outputs=2),
    case(
        "SVMRegressor",
        [X],
        {
            "coefficients": [0.5, -1.5],
            "support_vectors": [0.1, 0.2, 0.3, -0.1, 0.5, 0.2],
            "n_supports": 2,
            "rho": [0.3],
            "kernel_type": "RBF",
            "kernel_params": [0.25, 0.0, 3.0],
        },
        domain=ML,
    ),
    case("Scaler", [X], {"scale": [1.0, 2.0, 3.0], "offset": [0.5, 0.0, -1.0]}, domain=ML),
    case("Scaler", [(12,)], {"scale": [2.0] * 12, "offset": [*map(float, range(12))]}, domain=ML),
    case("TreeEnsemble", [X], ENSEMBLE, domain=ML),
    case(
        "TreeEnsembleClassifier",
        [X],
        {**TREE, **leaves("class", [0, 1, 2, 1, 0]), "classlabels_strings": ["a", "b", "c"]},
        domain=ML,
        outputs=2,
    ),
    case("TreeEnsembleRegressor", [X], {**TREE, **leaves("target", [0, 1, 1, 1, 0]), "n_targets": 2}, domain=ML),
]
