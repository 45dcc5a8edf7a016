"""Strategies of several tensors: of an op, of what means an op, and of regions of several ops, where they are one device matrix."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from dealt import dealt
from partc.compiler.ir.program import Complete
from rows import of_today
from shard_call_models import NET, collectives, line, said_by_compile, same_on_all_ranks

PRODUCT = """
def product(op, x, w):
    return op.MatMul(x, w)

def wider(op, x, w):
    return op.Tanh(op.MatMul(op.Relu(x), w))

class Product(nn.Module):
    def forward(self, op, x, w):
        return op.MatMul(x, w)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter([24, 24], init=nn.init.normal(0.1))
        self.layer = Product()
        self.matmul = nn.Op("MatMul")
        SETUP

    def forward(self, op, x):
        return op.Neg(CALL)

model = Net()
inputs = {"x": [48, 24]}
"""
X = np.random.default_rng(0).standard_normal((48, 24), dtype=np.float32)
FORMS = {
    "op": "shard(op.MatMul, in_strategy=CUTS)(x, self.w)",
    "function": "shard(product, in_strategy=CUTS)(op, x, self.w)",
    "lambda": "shard(lambda op, a, b: op.MatMul(a, b), CUTS)(op, x, self.w)",
    "method": "self.layer(op, x, self.w)",
    "op as a module": "self.matmul(op, x, self.w)",
    "several ops": "shard(wider, in_strategy=CUTS)(op, x, self.w)",
}


def net(form: str, cuts: object) -> str:
    called = {"method": "layer", "op as a module": "matmul"}
    setup = f"self.{called[form]}.shard(in_strategy={cuts})" if form in called else "pass"
    return PRODUCT.replace("SETUP", setup).replace("CALL", FORMS[form].replace("CUTS", str(cuts)))


def strategy_of(program: Complete, op_type: str) -> str:
    (found,) = [choice.strategy() for one, choice in program.choices.items() if one.node.op_type == op_type]
    return found


EIGHTS, TWELFTHS = (8, ((2, 4), (4, 1))), (12, ((2, 3), (3, 2)))


@pytest.mark.parametrize(
    ("form", "ranks", "cuts"),
    [
        *((form, *one) for form, one in dealt(FORMS, [EIGHTS, TWELFTHS])),
        *of_today(
            [
                ("op", 6, ((3, 1), (1, 1))),
                ("several ops", 6, ((1, 2), (2, 3))),
                ("several ops", 8, ((1, 8), (8, 1))),
            ],
            1,
        ),
    ],
)
def test_one_device_matrix_for_both_operands(
    tmp_path: Path, form: str, ranks: int, cuts: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    plan = f"ranks: {ranks}\noutputs: cut\n"
    program = same_on_all_ranks(tmp_path, net(form, cuts), plan, {"x": X}, rtol=1e-4, atol=1e-5)
    assert strategy_of(program, "MatMul") == str(cuts)
    (rows, summed), (_, columns) = cuts
    reductions = [sets for op_type, _, sets in collectives(program) if op_type == "AllReduce"]
    assert len(reductions) == len(program.events) == (summed > 1)
    at = np.arange(ranks).reshape(rows, summed, columns, -1)
    want = {tuple(map(int, at[m, :, n, r])) for m, n, r in np.ndindex(rows, columns, at.shape[3])}
    assert all(set(sets) == want for sets in reductions)


def test_a_module_that_is_an_op(tmp_path: Path) -> None:
    text = net("op as a module", "None")
    said = said_by_compile(tmp_path, text.replace('nn.Op("MatMul")', 'nn.Op("Matmul")'), "ranks: 2\n")
    where = f"model.py:{line(tmp_path, 'Matmul')}"
    assert said.startswith(f"{where}: ValueError: ONNX has no op 'Matmul'; the nearest are 'MatMul'")
    said = said_by_compile(tmp_path, text, "ranks: 2\n")
    assert "shard is given no strategy" in said
    text = text.replace("in_strategy=None", "out_strategy=((2, 1),)").replace("self.matmul(", "op.Softmax(self.matmul(")
    program = same_on_all_ranks(
        tmp_path, text.replace("self.w))", "self.w), axis=1))"), "ranks: 2\n", {"x": X}, rtol=1e-4, atol=1e-5
    )
    assert strategy_of(program, "MatMul") == "((2, 1), (1, 1))"


@pytest.mark.parametrize("ranks", of_today([6, 8, 12], 1))
def test_every_pair_of_cuts_that_fits(tmp_path: Path, ranks: int) -> None:
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
    triples = [(m, k, n) for m in fitting for k in fitting for n in fitting if ranks % math.prod((m, k, n)) == 0]
    for m, k, n in triples[::9]:
        text = net("several ops", ((m, k), (k, n)))
        program = same_on_all_ranks(tmp_path, text, f"ranks: {ranks}\noutputs: cut\n", {"x": X}, rtol=1e-4, atol=1e-5)
        assert strategy_of(program, "MatMul") == f"(({m}, {k}), ({k}, {n}))"
        assert len(program.events) == (k > 1)


@pytest.mark.parametrize(
    ("form", "cuts", "out", "kinds"),
    [
        ("op", "((2, 4), (4, 1))", "((2, 1),)", ["AllReduce"]),
        ("several ops", "((2, 4), (4, 1))", "((8, 1),)", ["ReduceScatter"]),
        ("several ops", "((1, 4), (4, 2))", "((1, 2),)", ["AllReduce"]),
        ("op", "((2, 1), None)", "((2, 4),)", []),
        ("several ops", "(None, None)", "((4, 2),)", []),
    ],
)
def test_what_leaves_is_cut_as_the_out_strategy_says(
    tmp_path: Path, form: str, cuts: str, out: str, kinds: list[str]
) -> None:
    text = net(form, cuts).replace(f"in_strategy={cuts}", f"in_strategy={cuts}, out_strategy={out}")
    program = same_on_all_ranks(tmp_path, text, "ranks: 8\noutputs: cut\n", {"x": X}, rtol=1e-4, atol=1e-5)
    assert [op_type for op_type, _, _ in collectives(program)] == kinds
    (held,) = program.parts[7].outputs
    assert str(held.version.layout) == f"[{out[2:-3]}]"


def test_every_call_of_a_module_has_its_out_strategy(tmp_path: Path) -> None:
    text = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 12)

    def forward(self, op, x):
        return op.Relu(self.up(op, x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.block.shard(((1, 4),), ((4, 1),))

    def forward(self, op, x):
        return op.Neg(self.block(op, self.block(op, x)))

model = Net()
inputs = {"x": [8, 12]}
"""
    x = np.random.default_rng(1).standard_normal((8, 12), dtype=np.float32)
    program = same_on_all_ranks(tmp_path, text, "ranks: 4\noutputs: cut\n", {"x": x}, rtol=1e-4, atol=1e-5)
    assert program.pinned is not None
    lies = {one.node.outputs[k].name: str(layout) for (one, k), (layout, _) in program.pinned.outputs.items()}
    assert lies == {"block.Relu": "[4, 1]", "block.Relu_1": "[4, 1]"}


def test_parameters_are_cut_together_with_what_enters(tmp_path: Path) -> None:
    text = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter([24, 16], init=nn.init.normal(0.1))

    def forward(self, op, x):
        return op.Tanh(op.MatMul(op.Relu(x), self.w))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.block.shard(((2, 1),), parameter_plan={"w": (1, 4)})

    def forward(self, op, x):
        return self.block(op, x)

model = Net()
inputs = {"x": [48, 24]}
"""
    program = same_on_all_ranks(tmp_path, text, "ranks: 8\noutputs: cut\n", {"x": X}, rtol=1e-4, atol=1e-5)
    assert strategy_of(program, "MatMul") == "((2, 1), (1, 4))"
    assert not program.events


def test_a_parameter_lies_as_its_rule_says_and_is_gathered_where_it_is_read_otherwise(tmp_path: Path) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(24, 16)
        self.fc.shard(((2, 4),), parameter_plan={"weight": (1, 8)})

    def forward(self, op, x):
        return self.fc(op, x)

model = Net()
inputs = {"x": [48, 24]}
"""
    program = same_on_all_ranks(tmp_path, text, "ranks: 8\n", {"x": X}, rtol=1e-4, atol=1e-5)
    assert program.warnings == ()
    assert collectives(program)[0][:2] == ("Exchange", "fc.weight")
    assert {str(held.version.layout) for held in program.parts[5].weights if str(held.value) == "fc.weight"} == {
        "[1, 8]"
    }


def test_a_parameter_is_gathered_for_a_reader_whose_layout_is_derived_since_its_rule_asks(tmp_path: Path) -> None:
    text = (
        NET
        + 'model = Net()\nmodel.block1.shard(((8, 1),), parameter_plan={"dense2.weight": (8, 1)})\ninputs = {"x": [64, 32]}\n'
    )
    x = np.random.default_rng(1).standard_normal((64, 32), dtype=np.float32)
    program = same_on_all_ranks(tmp_path, text, "ranks: 8\n", {"x": x}, rtol=1e-4, atol=1e-5)
    (event,) = [event for event in program.events if event.value.name == "block1.dense2.weight"]
    assert (event.op_type, event.derived) == ("AllGather", False)


UNLIKE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1 = nn.Linear(24, 24)

    def forward(self, op, x, y):
        return op.Relu(self.d1(op, x)), op.Add(x, y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.block = Block()
        self.block.shard(in_strategy=((1, 6), (6, 1)))

    def forward(self, op, x):
        u, v = self.block(op, x, self.first(op, x))
        u, v = self.block(op, u, v)
        return op.Sub(u, v)

model = Net()
inputs = {"x": ["batch", 24]}
"""


def test_values_that_enter_unlike_each_other_are_resharded(tmp_path: Path) -> None:
    plan = "ranks: 6\noutputs: cut\nsymbols: {batch: {divisor: 6}}\n"
    program = same_on_all_ranks(tmp_path, UNLIKE, plan, {"x": X}, {"x": X[:6]}, rtol=1e-4, atol=1e-5)
    asked = [event for event in program.events if event.value.name == "first.Gemm"]
    where = f"model.py:{line(tmp_path, 'block.shard')} 'block'"
    assert [(event.op_type, event.cause) for event in asked] == [("AllToAll", f"read by block.Add ({where})")]


def test_an_op_says_why_it_cannot_take_a_cut(tmp_path: Path) -> None:
    said = said_by_compile(tmp_path, net("op", ((2, 4), (2, 1))), "ranks: 8\n")
    where = f"model.py:{line(tmp_path, 'return op.Neg')}"
    assert said == (
        f"{where}: sharding of 'MatMul' (MatMul): input 0, dim 1 is cut into 4, but input 1, dim 0 into 2\n"
        "  these dims correspond: they are cut alike"
    )
    said = said_by_compile(tmp_path, net("function", ((3, 4), (4, 1))), "ranks: 8\n")
    assert said.startswith(
        f"{where}: sharding of 'product' (MatMul): the strategy has 12 shards, but the group has 8 ranks\n"
    )
    said = said_by_compile(tmp_path, net("method", ((5, 1), (1, 1))), "ranks: 5\n")
    where = f"model.py:{line(tmp_path, 'layer.shard')}"
    assert said.startswith(f"{where}: MatMul (layer.MatMul): cannot cut 'x' dim 0 (48) into 5\n  48 is not divisible")


NORMED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 16)

    def forward(self, op, x):
        y = op.Reshape(x, op.Constant(value_ints=[-1, 24]))
        return self.up(op, self.norm(op, y)) if INNER else self.up(op, y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.block.shard(in_strategy=(CUT,))

    def forward(self, op, x):
        return self.block(op, op.Neg(x))

model = Net()
inputs = {"x": ["batch", "seq", 24]}
"""


def test_a_region_says_its_nodes_reason(tmp_path: Path) -> None:
    text = NORMED.replace("INNER", "True").replace("CUT", "(4, 1, 1)")
    said = said_by_compile(tmp_path, text, "ranks: 4\nsymbols: {batch: {divisor: 2}}\n")
    where = f"model.py:{line(tmp_path, 'block.shard')}"
    assert f"{where}: Reshape (block.Reshape): cannot cut 'Neg' dim 0 (batch) into 4\n" in said
    assert "'batch' is 2*N (plan.yaml:2), not always divisible by 4" in said
    assert "help: declare `batch: {divisor: 4}` under symbols" in said


def test_a_region_is_resharded_around_an_op_that_needs_a_dim_whole(tmp_path: Path) -> None:
    text = NORMED.replace("op.Reshape(x, op.Constant(value_ints=[-1, 24]))", "self.norm(op, x)")
    text = text.replace("INNER", "False").replace("CUT", "(1, 1, 4)")
    x = np.random.default_rng(2).standard_normal((2, 3, 24), dtype=np.float32)
    program = same_on_all_ranks(tmp_path, text, "ranks: 4\n", {"x": x}, rtol=1e-4, atol=1e-5)
    where = f"model.py:{line(tmp_path, 'block.shard')}"
    told = f"{where}: 'Neg' enters cut [1, 1, 4], but LayerNormalization (block.norm.LayerNormalization) needs dim 2"
    idle = "ranks 1, 2, 3 have nothing to do; place nodes there, or lower `ranks`"  # rank 0 alone reads what all could compute
    assert program.warnings == (f"{told} replicated: it is gathered there", idle)
