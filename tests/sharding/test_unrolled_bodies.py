"""Bodies of a known number of turns: written out where a plan names what is in them, their weights cut out of the stack, else refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from body_models import weighed
from equivalence import compiled, counted, same_as_whole
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.torch.torch_model import torch_model_of
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.propose import propose
from partc.compiler.rewrite.evaluation import KnownNumbers
from partc.compiler.unroll import layers_unrolled
from partc.runtime import load_local
from random_bodies import different
from rows import of_today
from training_equivalence import same_training

LAYERS, WIDTH, HIDDEN = 4, 6, 10
LAYERED = """net (float[batch, 6] x) => (float[batch, 6] y, float[4, batch, 6] all) {
    [first] h0 = Mul(x, x)
    [layers] h, all = Scan <num_scan_inputs = 3, body = layer (float[b, 6] a, float[6, 10] up, float[10] bias, float[10, 6] down)
        => (float[b, 6] after, float[b, 6] out) {
        [mlp__up__MatMul] p = MatMul(a, up)
        [mlp__up__Add] q = Add(p, bias)
        [mlp__act] r = Tanh(q)
        [mlp__down__MatMul] s = MatMul(r, down)
        [mlp__add] after = Add(s, a)
        [seen] out = Relu(after) }> (h0, UP, BIAS, DOWN)
    [last] y = Mul(h, h)
}"""
WEIGHTS = {"UP": (LAYERS, WIDTH, HIDDEN), "BIAS": (LAYERS, HIDDEN), "DOWN": (LAYERS, HIDDEN, WIDTH)}
TENSOR_PARALLEL = 'ranks: 2\nsharding: {"layers.*.mlp.up": colwise, "layers.*.mlp.down": rowwise}\n'
STAGES = """ranks: 2
symbols: {batch: {divisor: 2}}
pipeline: {microbatches: 2, stages: [["first", "layers.[0-1]"], ["layers.[2-3]", "last"]]}
"""
TRAIN = (
    "train:\n  loss: {type: mse, prediction: y, target: t}\n  optimizer: {type: momentum, lr: 0.001, momentum: 0.9}\n"
)


def layered(opset: int = 21) -> onnx.ModelProto:
    return weighed(LAYERED, WEIGHTS, opset)


def batch(*shape: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}


@pytest.mark.parametrize("opset", [11, 21])
def test_layers_of_a_scan_are_cut(opset: int) -> None:
    """Every layer has one AllReduce, and ranks half of its weights."""
    program = same_as_whole(layered(opset), TENSOR_PARALLEL, batch(3, 6), rtol=1e-4, atol=1e-5, checked=True)
    assert counted(program)["AllReduce"] == LAYERS
    shapes = {str(one.value): one.value.shape for one in program.parts[0].weights}
    assert {shapes[f"layers.{k}.UP"] for k in range(LAYERS)} == {(WIDTH, HIDDEN // 2)}


@pytest.mark.parametrize("plan", [TENSOR_PARALLEL, STAGES], ids=["tp", "stages"])
def test_layers_of_a_scan_train(plan: str, tmp_path: Path) -> None:
    """The stacks are the parameters, whatever ranks have of them."""
    steps = [{**batch(4, 6), "t": np.ones((4, 6), np.float32) / (k + 1)} for k in range(3)]
    same_training(
        lambda: Source(from_proto(layered(), Path("model.onnx"))), plan + TRAIN, tmp_path, steps, rtol=1e-4, atol=1e-5
    )


def test_turns_with_weights_are_proposed_as_layers() -> None:
    """A stage has the weights of its turns."""
    source = layers_unrolled(Source(from_proto(layered(), Path("model.onnx"))))
    plan, missing = propose(source, "model.onnx", Degrees(1, 1, 2))
    assert not missing
    assert '"layers.[0-1]": 0' in plan
    assert '"layers.[2-3]": 1' in plan


FORMS = {
    "a scan of two states, from the last to the first along the second axis": """
net (float[4, 6] x) => (float[4, 6] y, float[4, 6] n, float[4, 6, 3] all) {
    n0 = Neg(x)
    y, n, all = Scan <num_scan_inputs = 2, scan_input_axes = [1, -1], scan_input_directions = [1, 0], scan_output_axes = [-1],
        scan_output_directions = [1], body = turn (float[4, 6] a, float[4, 6] b, float[6, 6] u, float[6, 6] v)
        => (float[4, 6] c, float[4, 6] d, float[4, 6] e) {
        [one] p = MatMul(a, u)
        q = MatMul(b, v)
        c = Tanh(q)
        d = Add(p, x)
        e = Mul(c, d) }> (x, n0, U, V)
}""",
    "a loop that stacks, whose trip count is a size": """net (float[4, 6] x) => (float[4, 6] y, float[t, 4, 6] all)
<bool yes = {1}, int64 zero = {0}> {
    sizes = Shape(x)
    trips = Gather(sizes, zero)
    y, all = Loop <body = turn (int64 i, bool on, float[4, 6] a) => (bool on2, float[4, 6] c, float[4, 6] a2) <float[6, 6] own = {OWN}> {
        on2 = Identity(on)
        n = Cast<to = 1>(i)
        s = Mul(a, n)
        [one] p = MatMul(s, own)
        c = Add(p, x)
        a2 = Identity(a) }> (trips, yes, x)
}""",
    "a while with a counter of its own": """net (float[4, 6] x) => (float[4, 6] y)
<int64 begin = {2}, bool yes = {1}, int64 two = {2}, int64 end = {9}, float[6, 6] w = {OWN}> {
    k, y = Loop <body = turn (int64 i, bool on, int64 k, float[4, 6] a) => (bool more, int64 k2, float[4, 6] c) {
        k2 = Add(k, two)
        more = Less(k2, end)
        [one] p = MatMul(a, w)
        c = Tanh(p) }> ("", yes, begin, x)
}""",
    "a loop whose turns read slices, and branches that the turn decides": """net (float[4, 6] x) => (float[4, 6] y)
<int64 trips = {3}, int64 last = {2}, int64[1] zero = {0}, int64 one = {1}> {
    y = Loop <body = turn (int64 i, bool on, float[4, 6] a) => (bool more, float[4, 6] c) {
        more = Identity(on)
        row = Unsqueeze(i, zero)
        after = Add(i, one)
        end = Unsqueeze(after, zero)
        some = Slice(U3, row, end, zero)
        w = Squeeze(some, zero)
        [one] p = MatMul(a, w)
        is_last = Equal(i, last)
        c = If (is_last) <then_branch = yes () => (float[4, 6] t) { t = Neg(p) },
            else_branch = no () => (float[4, 6] e) { [inner] e = Tanh(p) }> }> (trips, "", x)
}""",
    "a scan in a loop, of one turn": """net (float[4, 6] x) => (float[4, 6] y, float[2, 1, 4, 6] all)
<int64 trips = {2}> {
    y, all = Loop <body = turn (int64 i, bool on, float[4, 6] a) => (bool more, float[4, 6] c, float[1, 4, 6] s) {
        more = Identity(on)
        b = Add(a, x)
        c, s = Scan <num_scan_inputs = 1, body = inner (float[4, 6] d, float[6, 6] w) => (float[4, 6] f, float[4, 6] g) {
            [one] f = MatMul(d, w)
            g = Sin(f) }> (b, W1) }> (trips, "", x)
}""",
    "a state that changes its size": """net (float[4, 6] x) => (float[4, 18] y)
<int64 two = {2}> {
    y = Loop <body = turn2 (int64 j, bool on2, float[4, m] b) => (bool more2, float[4, n] d) {
        more2 = Identity(on2)
        f = MatMul(x, W2)
        [one] d = Concat<axis = 1>(b, f) }> (two, "", x)
}""",
}
USED = {"U": (6, 3, 6), "V": (6, 6, 3), "U3": (3, 6, 6), "W1": (1, 6, 6), "W2": (6, 6)}


@pytest.mark.parametrize("form", FORMS)
def test_turns_are_those_of_the_loop(form: str) -> None:
    own = "{" + ", ".join(f"{number:.3f}" for number in np.random.default_rng(5).normal(size=36) / 3) + "}"
    text = FORMS[form].replace("{OWN}", own)
    proto = weighed(text, {name: shape for name, shape in USED.items() if f"{name})" in text or f"{name}," in text})
    program = same_as_whole(
        proto, 'ranks: 2\nsharding: {"**.one": {in: [[1, 2]]}}\n' if "Concat" not in text else 'ranks: 2\nplacement: {"**.one": 1}\n',
        batch(4, 6), rtol=1e-5, atol=1e-5, checked=True,
    )  # fmt: skip
    assert not [node for node in program.model.graph if node.op_type in ("Scan", "Loop")]


def test_random_bodies_are_written_out() -> None:
    """Loops, branches and scans in each other: all whose turns are known, with the numbers of the loops."""
    assert [text for seed in of_today(range(12), 4) if (text := different(seed)[0])] == []


LOOKED_UP = {
    "a state that is handed on": """net (float[4, 6] x) => (float[4, 6] y)
<int64 trips = {4}> {
    [layers] y, unused = Loop <body = turn (int64 i, bool on, float[4, 6] a, float[4, 6, 6] all)
        => (bool on2, float[4, 6] c, float[4, 6, 6] all2) {
        on2 = Identity(on)
        w = Gather(all, i)
        [one] p = MatMul(a, w)
        c = Tanh(p)
        all2 = Identity(all) }> (trips, "", x, STACK)
}""",
    "a slice of all axes": """net (float[4, 6] x) => (float[4, 6] y)
<int64 trips = {4}, int64[1] zero = {0}, int64[2] zeros = {0, 0}, int64[3] sizes = {1, 6, 6}, int64[3] axes = {0, 1, 2}> {
    [layers] y = Loop <body = turn (int64 i, bool on, float[4, 6] a) => (bool on2, float[4, 6] c) {
        on2 = Identity(on)
        row = Unsqueeze(i, zero)
        begin = Concat<axis = 0>(row, zeros)
        end = Add(begin, sizes)
        some = Slice(STACK, begin, end, axes)
        w = Squeeze(some, zero)
        [one] p = MatMul(a, w)
        c = Tanh(p) }> (trips, "", x)
}""",
}


@pytest.mark.parametrize("form", LOOKED_UP)
def test_a_stack_that_turns_look_up_is_cut(form: str, tmp_path: Path) -> None:
    """As jax2onnx writes scans and loops: each rank has the weights of its turns, also in training."""
    proto, plan = (
        weighed(LOOKED_UP[form], {"STACK": (4, 6, 6)}),
        "ranks: 2\nplacement: {'layers.[0-1]': 0, 'layers.[2-3]': 1}\n",
    )
    program = same_as_whole(proto, plan, batch(4, 6), rtol=1e-5, atol=1e-5, checked=True)
    for rank in (0, 1):
        held = [one.value.shape for one in program.parts[rank].weights if len(one.value.shape or ()) > 1]
        assert sum(np.prod(shape) for shape in held) == 2 * 6 * 6
    if "Slice" in LOOKED_UP[form]:
        return  # a loop that slices by its turn has no gradient as it stands, to compare with
    steps = [{**batch(4, 6), "t": np.ones((4, 6), np.float32)} for _ in range(2)]
    trained = same_training(
        lambda: Source(from_proto(proto, Path("model.onnx"))), plan + TRAIN, tmp_path, steps, rtol=1e-4, atol=1e-4
    )
    for rank in (0, 1):
        kept = [one.value.shape for one in trained.parts[rank].state if one.kind == "parameter"]
        assert kept == [(1, 6, 6)] * 2


CHOICES = """net (float[4, 6] x, bool c) => (float[4, 6] y)
<bool yes = {1}> {
    [known] a = If (yes) <then_branch = one () => (float[4, 6] t) { [kept] t = MatMul(x, W2) },
        else_branch = other () => (float[4, 6] e) { e = Neg(x) }>
    [open] y = If (c) <then_branch = more () => (float[4, 6] u) { [inner] u = Relu(a) },
        else_branch = less () => (float[4, 6] v) { v = Tanh(a) }>
}"""


def test_numbers_that_are_known_before_a_run() -> None:
    """A quotient is truncated as in a run; a divisor that is not above 0 is left to the run, which may end by it."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 21]>
    net (int64[2] k, float[2] x) => (int64[2] quotient, int64[2] by_zero, int64[2] rest, bool[2] less, float[2] f)
    <int64[2] seven = {7, -7}, int64[2] two = {2, 2}, int64[2] zero = {0, 1}, int64[2] one = {-1, -1}> {
        quotient = Div(seven, two)
        by_zero = Div(seven, zero)
        rest = Mod(seven, one)
        less = Less(k, seven)
        f = Relu(x) }""")
    graph = ir.from_proto(model).graph
    quotient, *unknown = graph.outputs
    numbers = KnownNumbers(21)
    assert np.array_equal(numbers.of(quotient), [3, -3])
    assert [numbers.of(value) for value in unknown] == [None] * 4
    for turn in (6, 8):
        known = numbers.of(unknown[2], {graph.inputs[0]: np.array([turn, -8])})
        assert np.array_equal(known, [turn < 7, True])


def test_the_branch_of_a_known_condition_stands_for_its_if() -> None:
    proto = weighed(CHOICES, {"W2": (6, 6)})
    for c in (True, False):
        given = {**batch(4, 6), "c": np.array(c)}
        program = same_as_whole(
            proto, "ranks: 2\nsharding: {known.kept: {in: [[1, 2], [2, 1]]}}\n", given, rtol=1e-5, atol=1e-6
        )
    assert program.paths[program.model.graph[0]] == "known.kept"


REFUSED = {
    "a long scan": (
        """net (float[4, 6] x, float[7000, 6] xs) => (float[4, 6] y) {
    [rows] y = Scan <num_scan_inputs = 1, body = turn (float[4, 6] a, float[6] b) => (float[4, 6] d) {
        [one] m = MatMul(a, W2)
        n = Add(m, b)
        d = Tanh(n) }> (x, xs) }""",
        "rows.17.one",
        "'rows.17.one' matches MatMul 'one' alone, inside of the body of Scan ('rows')",
        ": it has 7,000 turns of 3 nodes, and a body is written out into at most 20,000",
        "write 'rows', or name all turns by '*', or take fewer turns a loop",
    ),
    "draws of one seed": (
        """net (float[4, 6] x, float[3, 4, 6] xs) => (float[4, 6] y) {
    [rows] y = Scan <num_scan_inputs = 1, body = turn (float[4, 6] a, float[4, 6] b) => (float[4, 6] d) {
        [one] m = MatMul(a, W2)
        n = RandomNormalLike<seed = 3.0>(m)
        d = Add(m, n) }> (x, xs) }""",
        "rows.*.one",
        "'rows.*.one' matches MatMul 'one' alone, inside of the body of Scan ('rows')",
        ": its RandomNormalLike draws on from turn to turn with one seed, and written out each turn would begin with it",
        "write 'rows', or leave out the seed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_body_that_cannot_be_written_out_is_refused(case: str, tmp_path: Path) -> None:
    text, pattern, fact, why, help = REFUSED[case]
    with pytest.raises(CompileError) as caught:
        compiled(weighed(text, {"W2": (6, 6)}), f"ranks: 2\nplacement: {{'{pattern}': 1}}\n", tmp_path / "build")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"plan.yaml:2: {fact}"
    assert lines[1].endswith(f"unless it is written out turn by turn{why}")
    assert lines[2] == f"  help: {help}"


def layers_of_torch(folder: Path) -> None:
    """Cuts the turns of `scan` and of a `while_loop`, whose number is known, and leaves `cond`."""
    source = exported(folder, TORCH)
    plan = 'ranks: 2\nsharding: {"scanned.*.MatMul": colwise, "repeated.*.lin": colwise}\n'
    program = compile_source(source, parse_plan(plan, "plan.yaml"), folder / "build").program
    paths = set(program.paths.values())
    assert {f"scanned.{k}.MatMul" for k in range(4)} | {f"repeated.{k}.lin.Gemm" for k in range(3)} <= paths
    assert "choice.If" in paths
    same_as_torch(source, folder / "build", 2)


def bodies_of_torch(folder: Path) -> None:
    """Cuts the body of a `while_loop` that ends by a value, and the branches of `cond`."""
    source = exported(folder, KEPT)
    rules = ", ".join(f'"{path}": {style}' for path, style in STYLES.items())
    plan = parse_plan(f"ranks: 2\nsharding: {{{rules}}}\n", "plan.yaml")
    program = compile_source(source, plan, folder / "build").program
    assert counted(program)["Begin"] == 2
    assert counted(program)["AllReduce"] >= 1
    same_as_torch(source, folder / "build", 4)


def exported(folder: Path, text: str) -> Source:
    import torch
    from partc.compiler.frontend.python import load_python

    (folder / "model.py").write_text(text)
    torch.manual_seed(0)
    return load_python(folder / "model.py")


def same_as_torch(source: Source, build: Path, count: int) -> None:
    """Compares so many inputs and their negatives with the module."""
    import torch

    model = torch_model_of(source.model)
    assert model is not None
    with load_local(build) as ranks, torch.no_grad():
        for seed in range(count):
            x = 3 * np.random.default_rng(seed).normal(size=(3, 8)).astype(np.float32)
            for given in (x, -x):
                want = model.module(torch.tensor(given))
                np.testing.assert_allclose(ranks({"x": given})["output"], want, rtol=1e-4, atol=1e-5)


STYLES = {
    "refined.body.up": "colwise",
    "refined.body.down": "rowwise",
    "choice.then_branch.a": "colwise",
    "choice.else_branch.b": "colwise",
}
KEPT = """
import torch
from torch._higher_order_ops.while_loop import while_loop


class Refined(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x):
        def on(k, h):
            return (h.abs().max() > 0.3) & (k < 20)

        def turn(k, h):
            return k + 1, 0.5 * torch.tanh(self.down(torch.relu(self.up(h))))

        return while_loop(on, turn, (torch.tensor(0), x))[1]


class Choice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 6), torch.nn.Linear(8, 6)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x).relu(), (x,))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.refined, self.choice = Refined(), Choice()

    def forward(self, x):
        return self.choice(self.refined(x))


model = Net().eval()
inputs = {"x": torch.zeros(3, 8)}
"""


TORCH = """
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop


class Scanned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x):
        def layer(h, weight):
            h = torch.tanh(h @ weight)
            return h, h.mean(-1)

        return scan(layer, x, self.weight)[0]


class Repeated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)

    def forward(self, x):
        return while_loop(lambda k, h: k < 3, lambda k, h: (k + 1, torch.tanh(self.lin(h))), (torch.tensor(0), x))[1]


class Choice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x).relu(), (x,))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scanned, self.repeated, self.choice = Scanned(), Repeated(), Choice()

    def forward(self, x):
        return self.choice(self.repeated(self.scanned(x)))


model = Net().eval()
inputs = {"x": torch.zeros(3, 8)}
"""


@pytest.mark.parametrize("cut", of_today([layers_of_torch, bodies_of_torch], 1))
def test_bodies_of_torch_are_cut(cut: Callable[[Path], None], tmp_path: Path) -> None:
    """In this order: torch fails to export the second module first, and the first one after it, in one process."""
    pytest.importorskip("torch")
    cut(tmp_path)
