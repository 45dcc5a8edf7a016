"""Every op rule is proven: what it claims holds, what it lacks is listed with a reason, what it says is a golden text."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from conftest import Golden
from partc.compiler.analysis import shape_rules
from partc.compiler.analysis.infer_shapes import infer_shapes
from partc.compiler.dims.facts import Facts
from partc.compiler.ops.notation import replicated_rule
from partc.compiler.ops.registry import Entry, entries, fresh_rule, rule_of, standard_ops
from partc.compiler.ops.rule import OWN, Local, Rule
from partc.compiler.rewrite.class_losses import write_out_class_loss
from partc.compiler.rewrite.opset import BENT, decompose
from rows import first_and_of_today, of_today, rows
from rule_case import feeds_of, run
from rule_prover import Case, case, equal, local_of, node_of, text_of, unclaimed, violations
from rules_case import CASES, HERE, MODULES

PROVEN = {(one.domain, one.op_type) for one in CASES}
GRADIENTS = [importlib.import_module(path.stem) for path in sorted(HERE.glob("gradient_cases_*.py"))]
CASES += [one.case for module in GRADIENTS for one in module.CASES if (one.case.domain, one.case.op_type) not in PROVEN]
FIRST = {(one.domain, one.op_type): one for one in reversed(CASES)}
TODAY = first_and_of_today(CASES, lambda one: (one.domain, one.op_type))


@rows("case", TODAY)
def test_what_the_rule_claims_holds(case: Case) -> None:
    assert violations(case) == []


@rows("case", of_today([one for one in CASES if one.enumerated], len(CASES) // 4))
def test_what_the_rule_lacks_is_listed(case: Case) -> None:
    assert unclaimed(case) == set(case.lacks)


def _without(name: str, node: ir.Node) -> None:
    del node.attributes[name]


def _with_dim(k: int, dim: int, size: int | ir.SymbolicDim, node: ir.Node) -> None:
    value = node.inputs[k]
    assert value is not None
    assert value.shape is not None
    value.shape = ir.Shape([size if at == dim else old for at, old in enumerate(value.shape.dims)])


def _with_input(k: int, name: str, fact: object, node: ir.Node) -> None:
    setattr(node.inputs[k], name, fact)


def _with_output(k: int, shape: ir.Shape | None, node: ir.Node) -> None:
    node.outputs[k].shape = shape


def _without_output(k: int, node: ir.Node) -> None:
    node.outputs[k].name, node.outputs[k].shape = "", None


def _with_version(version: int, node: ir.Node) -> None:
    node.version = version


def changes(case: Case) -> Iterator[Callable[[ir.Node], None]]:
    """Changes of the case's node in one thing that a rule may read."""
    node = node_of(case)
    for name in case.attributes:
        yield partial(_without, name)
    for k, value in enumerate(node.inputs):
        if value is None:
            continue
        for dim in range(len(value.shape or ())):
            for size in (1, 6, ir.SymbolicDim("n"), ir.SymbolicDim(None)):
                yield partial(_with_dim, k, dim, size)
        for dtype in (ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.DOUBLE, ir.DataType.STRING):
            yield partial(_with_input, k, "dtype", dtype)
        for const in (None, ir.tensor(np.array([0])), ir.tensor(np.array([1, 1])), ir.tensor(np.array([-1.5]))):
            yield partial(_with_input, k, "const_value", const)
    for k, out in enumerate(node.outputs):
        for dims in ([1] * len(out.shape or ()), [6] * len(out.shape or ()), [6, 2, 3]):
            yield partial(_with_output, k, ir.Shape(dims))
        yield partial(_with_output, k, None)
        yield partial(_without_output, k)
    for version in (1, 7, 12, 23):
        yield partial(_with_version, version)


def alike(case: Case) -> list[ir.Node]:
    """The case's node, a quarter of its changes, others each day, and the node again."""
    every = [*changes(case)]
    chosen = of_today(every, len(every) // 4)
    nodes = [node_of(case) for _ in range(2 + len(chosen))]
    for change, node in zip(chosen, nodes[1:-1], strict=True):
        change(node)
    return nodes


def found(rule: Callable[[ir.Node], Rule], node: ir.Node) -> Rule | str:
    """A node's rule but for its closures, or what asking for it raises."""
    try:
        return replace(rule(node), local=None)
    except Exception as error:
        return type(error).__name__


@rows("case", [*FIRST.values()])
def test_nodes_that_share_a_rule_have_it_by_themselves(case: Case) -> None:
    for node in alike(case):
        assert found(rule_of, node) == found(fresh_rule, node)


def inferred(nodes: list[ir.Node]) -> list[list[str]]:
    """The types and dims of the nodes' outputs; names that are not given are all alike."""
    inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    values = {
        value: ir.Value(name=f"x{k}", type=value.type, shape=value.shape, const_value=value.const_value)
        for k, value in enumerate(inputs)
    }
    nodes = [
        ir.Node(
            node.domain,
            node.op_type,
            [values[value] if value is not None else None for value in node.inputs],
            node.attributes.values(),
            num_outputs=len(node.outputs),
        )
        for node in nodes
    ]
    opsets = {"": 21, "com.microsoft": 1, "ai.onnx.ml": 4}
    graph = ir.Graph(list(values.values()), [], nodes=nodes, opset_imports=opsets)
    infer_shapes(ir.Model(graph, ir_version=11), {"n": Facts(min=1)})
    return [[re.sub(r"\b_d\d+", "_", f"{out.type} {out.shape}") for out in node.outputs] for node in nodes]


@rows("case", [one for one in FIRST.values() if one.domain != OWN])
def test_nodes_that_are_alike_have_the_shapes_that_each_has_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inferred(alike(case))
    monkeypatch.setattr(shape_rules, "key_of", lambda node: None)
    assert found == inferred(alike(case))


def test_nodes_of_equal_layers_share_a_rule() -> None:
    one, other = (node_of(case("MatMul", [(2, 6, 12), (12, 18)])) for _ in range(2))
    assert rule_of(one) is rule_of(other)


def test_every_standard_op_has_an_entry() -> None:
    assert set(standard_ops(23)) - {entry.op_type for entry in entries() if entry.domain == ""} == set()


def test_every_shardable_op_has_a_case() -> None:
    unproven = {name: reason for module in MODULES for name, reason in getattr(module, "UNPROVEN", {}).items()}
    without = {
        entry.name for entry in entries() if entry.notation.shardable and (entry.domain, entry.op_type) not in FIRST
    }
    assert without == set(unproven)


def test_a_rule_is_linear_only_where_its_entry_says_so() -> None:
    linear = {(entry.domain, entry.op_type) for entry in entries() if entry.notation.linear}
    assert [str(one) for one in CASES if rule_of(node_of(one)).linear and (one.domain, one.op_type) not in linear] == []


def line(entry: Entry) -> str:
    """What an op says of itself, and the rule of its first case."""
    first = FIRST.get((entry.domain, entry.op_type))
    return str(entry) if first is None else f"{entry}  |  {text_of(rule_of(node_of(first)))}"


def test_the_table_reads_as_it_did(golden: Golden) -> None:
    golden("ops.txt", "".join(f"{line(entry)}\n" for entry in entries()))


def emitted(node: ir.Node, letter: str, outputs: list[str]) -> list[str]:
    """What a node cut by one factor over 2 ranks makes there, with these names for its outputs."""
    local = local_of(node, rule_of(node), {letter: 2}, {letter: 1})
    (local.rule.local or Local.same)(local := replace(local, outputs=outputs))
    return [*local.constants, *(value.name or "" for made in local.nodes for value in made.outputs)]


@pytest.mark.parametrize("case", [one for one in FIRST.values() if rule_of(node_of(one)).local], ids=str)
def test_an_output_may_be_named_like_what_its_rule_makes(case: Case) -> None:
    node = node_of(case)
    given = [str(value.name) for value in node.outputs]
    for letter in rule_of(node).factors:
        words = [name.removeprefix(f"{given[0]}.") for name in emitted(node, letter, given) if name not in given]
        for k, word in itertools.product(range(len(given)), words):
            made = emitted(node, letter, [*given[:k], word, *given[k + 1 :]])
            assert len(made) == len({*made}), f"output {k} named '{word}', {letter} cut"


GEMM = case("Gemm", [(6, 12), (12, 18), (18,)])
WRONG = {
    "rows and columns exchanged": (case("MatMul", [(6, 12), (12, 6)]), Rule(("mk", "kn"), ("nm",), {"k": "sum"})),
    "a bias added by every rank": (GEMM, Rule(("mk", "kn", "n"), ("mn",), {"k": "sum"})),
    "a largest taken for a sum": (
        case("ReduceMax", [(6, 12)], {"axes": [1]}, opset=17),
        Rule(("ax",), ("a.",), {"x": "sum"}),
    ),
    "a mean without its share": (
        case("ReduceMean", [(6, 12)], {"axes": [1]}, opset=17),
        Rule(("ax",), ("a.",), {"x": "sum"}),
    ),
    "what is normalized over": (case("Softmax", [(6, 12)]), Rule(("ab",), ("ab",))),
    "a product of two sums": (case("Mul", [(6,), (6,)]), Rule(("a", "a"), ("a",), linear="joint")),
    "a sum with one of its terms": (case("Add", [(6,), (6,)]), Rule(("a", "a"), ("a",), linear="each")),
    "a row whose dims were not cut by 3": (case("Relu", [(8, 6)]), Rule(("ab",), ("ab",))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found(name: str) -> None:
    this, rule = WRONG[name]
    assert violations(this, lambda node: rule) != []


def test_every_row_that_a_rule_lacks_is_found() -> None:
    found = unclaimed(case("MatMul", [(6, 12), (12, 18)]), replicated_rule)
    assert found == {"S(0),R->S(0)", "R,S(1)->S(1)", "S(1),S(0)->P", "P,R->P", "R,P->P"}
    assert unclaimed(case("ReduceMax", [(6, 12)], constants={1: [1]}), replicated_rule) == {
        "S(0),R->S(0)",
        "S(1),R->P(max)",
    }


def value(name: str, *dims: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype))


Shapes = list[tuple[int | str, ...]]
READ: list[tuple[str, Shapes, dict[str, object], str]] = [
    ("Add", [("b", 1), (6, "b", 4)], {}, "b.,abc->abc"),
    ("Add", [("b",), ("c",)], {}, ".,.->."),
    ("Add", [("b",), (4,)], {}, ".,.->."),
    ("Add", [("2*b",), ("b*2",)], {}, "a,a->a"),
    ("Add", [("b",), (1,)], {}, "a,.->a"),
    ("Where", [("b", 4), (4,), ()], {}, "ab,b,->ab"),
    ("MatMul", [("b", "s", 6), ("b", 6, 4)], {}, "amk,akn->amn"),
    ("MatMul", [("b", "s", 6), ("c", 6, 4)], {}, ".mk,.kn->.mn"),
    ("MatMul", [("k",), ("k",)], {}, "k,k->"),
    ("Gemm", [("b", 6), (4, 6), ("b", 1)], {"transB": 1}, "mk,nk,m.->mn"),
    ("Gemm", [("b", 6), (6, 4), (4,)], {}, "mk,kn,n->mn"),
    ("Einsum", [(1, 3, 5), (6, 5, 7)], {"equation": "bij,bjk->bik"}, ".ij,bjk->bik"),
    ("Einsum", [("b", 5), ("b", 7)], {"equation": "bi,bj"}, "bi,bj->ij"),
    ("Conv", [("b", 6, "h", "w"), (4, 6, 1, 1)], {}, "nchw,oc..->nohw"),
    ("Conv", [("b", 6, "h", 8), (4, 6, 2, 2)], {"strides": [2, 2]}, "nc.w,oc..->no.w"),
    ("Softmax", [("b", "s", 6)], {}, "ab.->ab."),
    ("MatMul", [(3,), (3, 4, 5, 6)], {}, "k,abkn->abn"),
    ("Unheard", [("b", 6)], {}, "..->-"),
]


@pytest.mark.parametrize(("op_type", "shapes", "attributes", "text"), READ, ids=lambda one: str(one))
def test_dims_correspond_only_where_that_is_certain(
    op_type: str, shapes: Shapes, attributes: dict[str, Any], text: str
) -> None:
    inputs = [value(f"x{k}", *dims) for k, dims in enumerate(shapes)]
    node = ir.Node("", op_type, inputs, ir.convenience.convert_attributes(attributes))
    if op_type == "Conv":
        node.outputs[0].shape = ir.Shape([None] * 4)
    assert text_of(rule_of(node)) == text


def test_a_factor_whose_dims_may_broadcast_is_whole() -> None:
    node = ir.Node("", "Gemm", [value("x", "b", 6), value("w", 6, 4), value("c", "d", 4)])
    assert rule_of(node).factors == ("k", "n")


def test_an_operand_of_unknown_rank_leaves_the_op_whole() -> None:
    node = ir.Node("", "Add", [value("x", 6), ir.Value(name="y")])
    assert rule_of(node).factors == ()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("op_type", sorted(BENT))
def test_a_bent_sum_is_taken_apart(op_type: str, trains: bool) -> None:
    this = case(op_type, [(6, 12)], constants={1: [1]}, span=(0.5, 1.5))
    node = node_of(this)
    graph, feeds = node.graph, feeds_of(this)
    want = run([node], feeds, {}, this)
    assert graph is not None
    decompose(node, trains)
    total, bent = BENT[op_type]
    norm = ["Constant", "Constant", "Equal", "Where", bent, "Where"]
    assert [one.op_type for one in graph] == [total, *(norm if trains and bent == "Sqrt" else [bent])]
    assert [one.name for one in graph.outputs] == ["y0"]
    assert rule_of(graph[0]).reduce == {"b": "sum"}
    assert equal(run(list(graph), feeds, {}, this)[0], want[0], 1e-6)


LABELS = np.arange(72).reshape(6, 12) % 5
WEIGHED = [(6, 5, 12), LABELS, (5,)]
IGNORES = {"ignore_index": 3}
CLASS_LOSSES = [
    *(
        case(op_type, operands, {"reduction": reduction, **more})
        for op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
        for operands in (WEIGHED[:2], WEIGHED)
        for reduction in ("none", "mean", "sum")
        for more in ({}, IGNORES)
    ),
    case("SoftmaxCrossEntropyLoss", WEIGHED[:2], outputs=2),
    case("SoftmaxCrossEntropyLoss", [(6, 5), np.array([1, -100, 2, 0, -100, 4], np.int32)], {"ignore_index": -100}),
]


@pytest.mark.parametrize("this", CLASS_LOSSES, ids=str)
def test_a_class_loss_is_written_out(this: Case) -> None:
    node, feeds = node_of(this), feeds_of(this)
    graph, names = node.graph, [out.name for out in node.outputs]
    want = run([node], feeds, {}, this)
    assert graph is not None
    write_out_class_loss(node)
    assert this.op_type not in {one.op_type for one in graph}
    assert [one.name for one in graph.outputs][: len(names)] == names
    for one, other in zip(run(list(graph), feeds, {}, this), want, strict=True):
        assert equal(one, other, 1e-6)


@pytest.mark.parametrize(
    ("op_type", "shapes"), [("Gemm", [(6, 12), (12, 18), (18,)]), ("GlobalAveragePool", [(6, 12, 18)])]
)
def test_a_sum_that_needs_a_constant_of_unknown_type_is_not_cut(op_type: str, shapes: Shapes) -> None:
    typed = ir.Node("", op_type, [value(f"x{k}", *dims) for k, dims in enumerate(shapes)])
    untyped = ir.Node(
        "", op_type, [value(f"x{k}", *dims, dtype=ir.DataType.UNDEFINED) for k, dims in enumerate(shapes)]
    )
    assert len(rule_of(untyped).factors) == len(rule_of(typed).factors) - 1
