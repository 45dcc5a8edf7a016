"""Programs of several ranks as threads of one process: every kind of value, every kind of wiring, and failures without a hang."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from artifact_text import write
from partc.runtime import InputError, RankError, load_local
from partc.runtime.artifact.format import SymbolRecord


def send(value: str, peer: int, tag: int) -> str:
    return f"= partc.comm.Send <peer = {peer}, tag = {tag}> ({value})"


def recv(value: str, peer: int, tag: int) -> str:
    return f"{value} = partc.comm.Recv <peer = {peer}, tag = {tag}> ()"


PING_PONG = [
    f"""rank0 (float[batch, 3] x) => (float[batch, 3] y) <float[batch, 3] h, float[batch, 3] k>
    {{ h = Relu(x) {send("h", 1, 0)} {recv("k", 1, 1)} y = Sub(k, h) }}""",
    f"""rank1 () => () <float[batch, 3] h, float[batch, 3] k, float c = {{0.5}}>
    {{ {recv("h", 0, 0)} k = Mul(h, c) {send("k", 0, 1)} }}""",
]

ALONE = [
    """rank0 (float[batch, 3] x) => (float[batch, 3] y) <float[batch, 3] h, float c = {-0.5}>
    { h = Relu(x) y = Mul(h, c) }"""
]


def test_sizes_alternate(tmp_path: Path) -> None:
    with load_local(write(tmp_path, PING_PONG)) as program:
        for batch in (2, 5, 0, 2, 7, 5):
            x = np.random.default_rng(batch).normal(size=(batch, 3)).astype(np.float32)
            np.testing.assert_array_equal(program(x=x)["y"], np.maximum(x, 0) * np.float32(-0.5))


def test_more_sizes_than_schedules_are_kept(tmp_path: Path) -> None:
    with load_local(write(tmp_path, PING_PONG)) as program:
        for batch in (*range(1, 21), *range(1, 21)):
            assert program(x=np.full((batch, 3), 2, np.float32))["y"].tolist() == [[-1.0] * 3] * batch


def test_outputs_outlive_the_next_step(tmp_path: Path) -> None:
    with load_local(write(tmp_path, PING_PONG)) as program:
        first = program(x=np.full((2, 3), 2, np.float32))["y"]
        program(x=np.full((2, 3), 6, np.float32))
        assert first.tolist() == [[-1.0] * 3] * 2


@pytest.mark.parametrize("order", ["C", "F", "strided", "misaligned", "read-only"])
def test_inputs_of_any_layout(tmp_path: Path, order: str) -> None:
    x = np.arange(-6, 9, dtype=np.float32).reshape(5, 3)
    raw = np.zeros(x.nbytes + 1, np.uint8)
    raw[1:] = x.reshape(-1).view(np.uint8)
    frozen = x.copy()
    frozen.flags.writeable = False
    given = {
        "C": x,
        "F": np.asfortranarray(x),
        "strided": np.repeat(x, 2, axis=0)[::2],
        "misaligned": raw[1:].view(np.float32).reshape(5, 3),
        "read-only": frozen,
    }[order]
    with load_local(write(tmp_path, PING_PONG)) as program:
        for _ in range(2):
            np.testing.assert_array_equal(program(x=given)["y"], np.maximum(x, 0) * np.float32(-0.5))


@pytest.mark.parametrize("graphs", [PING_PONG, ALONE], ids=["two ranks", "one rank"])
def test_an_array_is_read_as_it_is_in_each_step(tmp_path: Path, graphs: list[str]) -> None:
    """Whatever became of it since the last step, of which it was an input, and after one that was refused."""
    x = np.arange(-6, 9, dtype=np.float32).reshape(5, 3)
    given = x.copy()
    with load_local(write(tmp_path, graphs)) as program:

        def check() -> None:
            np.testing.assert_array_equal(program(x=given)["y"], np.maximum(given, 0) * np.float32(-0.5))

        def refused(words: str, **inputs: object) -> None:
            with pytest.raises(InputError, match=words):
                program(**inputs)

        check()
        given *= -1
        check()
        given.resize((2, 3), refcheck=False)
        check()
        given.resize((50, 3), refcheck=False)
        check()
        given = given.copy()
        check()
        refused("the input 'x' is missing")
        check()
        refused("the model has no input 'z'", x=given, z=x)
        check()
        refused("is of float64", x=given.astype(np.float64))
        check()
        refused("axis 1 is 2, the model was compiled for 3", x=given[:, :2])
        check()
        refused("has 1 axes", x=given[0])
        given = np.asfortranarray(given)
        check()


def test_contiguous_inputs_are_not_copied(tmp_path: Path) -> None:
    with load_local(write(tmp_path, PING_PONG)) as program:
        x = np.full((2, 3), 2, np.float32)
        program(x=x)
        x[:] = 4
        assert program(x=x)["y"].tolist() == [[-2.0] * 3] * 2


def test_fan_out_and_an_output_used_elsewhere(tmp_path: Path) -> None:
    """`h` is an output and goes to three ranks; `x` is an input, an output, and is sent; five ranks; results come home."""
    graphs = [
        f"""rank0 (float[n, 3] x) => (float[n, 3] x, float[n, 3] h, float[n, 3] total)
        <float[n, 3] a, float[n, 3] b, float[n, 3] c>
        {{ {send("x", 4, 9)} h = Abs(x) {send("h", 1, 0)} {send("h", 2, 1)} {send("h", 3, 2)}
           {recv("a", 1, 3)} {recv("b", 2, 4)} {recv("c", 3, 5)} total = Sum(a, b, c) }}""",
        *(
            f"""rank{rank} () => () <float[n, 3] h, float[n, 3] {name}>
            {{ {recv("h", 0, rank - 1)} {name} = {op}(h) {send(name, 0, rank + 2)} }}"""
            for rank, name, op in ((1, "a", "Sqrt"), (2, "b", "Neg"), (3, "c", "Exp"))
        ),
        f"rank4 () => (float[n, 3] far) <float[n, 3] x> {{ {recv('x', 0, 9)} far = Add(x, x) }}",
    ]
    x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    with load_local(write(tmp_path, graphs)) as program:
        outputs = program({"x": x})
    h = np.abs(x)
    np.testing.assert_array_equal(outputs["h"], h)
    np.testing.assert_array_equal(outputs["x"], x)
    np.testing.assert_allclose(outputs["total"], np.sqrt(h) - h + np.exp(h), rtol=1e-6)
    np.testing.assert_array_equal(outputs["far"], x + x)
    assert outputs["x"] is not x


def test_a_received_value_and_a_weight_are_outputs_and_a_weight_is_sent(tmp_path: Path) -> None:
    graphs = [
        f"""rank0 (float[n] x) => (float[2] w) <float[n] h, float[2] w = {{1.5, 2.5}}>
        {{ {send("w", 1, 1)} h = Neg(x) {send("h", 1, 0)} }}""",
        f"rank1 () => (float[n] h, float[2] v) <float[2] w> {{ {recv('h', 0, 0)} {recv('w', 0, 1)} v = Neg(w) }}",
    ]
    with load_local(write(tmp_path, graphs)) as program:
        outputs = program(x=np.array([1, 2, 3], np.float32))
    assert {name: value.tolist() for name, value in outputs.items()} == {
        "w": [1.5, 2.5],
        "h": [-1.0, -2.0, -3.0],
        "v": [-1.5, -2.5],
    }


@pytest.mark.parametrize("external", [False, True])
def test_weights_in_their_own_file(tmp_path: Path, external: bool) -> None:
    graphs = [
        f"""rank0 (float[n, 2] x) => () <float[n, 3] h, float[2, 3] w = {{1, 2, 3, 4, 5, 6}}, float[3] b = {{7, 8, 9}}>
        {{ p = MatMul(x, w) h = Add(p, b) {send("h", 1, 0)} {send("b", 1, 1)} }}""",
        f"rank1 () => (float[n, 3] y) <float[n, 3] h, float[3] b> {{ {recv('h', 0, 0)} {recv('b', 0, 1)} y = Sub(h, b) }}",
    ]
    with load_local(write(tmp_path, graphs, external=external)) as program:
        assert program(x=np.array([[1, 10]], np.float32))["y"].tolist() == [[41.0, 52.0, 63.0]]
    assert (tmp_path / "weights/rank_0000.safetensors").exists() == external


def test_unknown_shape_travels_with_its_shape(tmp_path: Path) -> None:
    graphs = [
        f"""rank0 (float[n] x) => (int64[2, k] p) <int64[1, k] p0>
        {{ p0 = NonZero(x) {send("p0", 1, 0)} {recv("p", 1, 1)} }}""",
        f"""rank1 () => () <int64[1, k] p0, int64[2, k] p>
        {{ {recv("p0", 0, 0)} p = Concat <axis = 0> (p0, p0) {send("p", 0, 1)} }}""",
    ]
    with load_local(write(tmp_path, graphs, shapes={"p0": None, "p": None})) as program:
        outputs = [program(x=np.array(x, np.float32))["p"] for x in ([0, 3, 0, 5], [0, 0], [1, 1, 1])]
    assert [one.tolist() for one in outputs] == [[[1, 3], [1, 3]], [[], []], [[0, 1, 2]] * 2]


def test_a_body_captures_a_received_value(tmp_path: Path) -> None:
    graphs = [
        f"rank0 (float[n] x) => () <float[n] h> {{ h = Neg(x) {send('h', 1, 0)} }}",
        f"""rank1 (bool flag) => (float[n] y) <float[n] h>
        {{ {recv("h", 0, 0)} y = If (flag) <then_branch = yes () => (float[n] a) {{ a = Add(h, h) }},
           else_branch = no () => (float[n] b) {{ b = Identity(h) }}> }}""",
    ]
    x = np.array([1, 2, 3], np.float32)
    with load_local(write(tmp_path, graphs)) as program:
        assert program(x=x, flag=np.array(True))["y"].tolist() == [-2.0, -4.0, -6.0]
        assert program(x=x, flag=np.array(False))["y"].tolist() == [-1.0, -2.0, -3.0]


def test_shapes_are_expressions(tmp_path: Path) -> None:
    graphs = [
        f"rank0 (float[n, 3] x) => () <float[m, 3] h> {{ h = Concat <axis = 0> (x, x) {send('h', 1, 0)} }}",
        f"rank1 () => (float[m, 3] y) {{ {recv('h', 0, 0)} y = Neg(h) }}",
    ]
    with load_local(write(tmp_path, graphs, shapes={"h": ["2*n", 3]})) as program:
        assert program(x=np.ones((4, 3), np.float32))["y"].shape == (8, 3)


def test_a_shape_that_cannot_be_is_refused_by_all(tmp_path: Path) -> None:
    graphs = [
        f"rank0 (float[n] x) => () <float[n] h> {{ h = Neg(x) {send('h', 1, 0)} }}",
        f"rank1 () => (float[m] y) {{ {recv('h', 0, 0)} y = Neg(h) }}",
    ]
    with load_local(write(tmp_path, graphs, shapes={"h": ["n/2 - 3"]})) as program:
        with pytest.raises(
            InputError, match=re.escape("with n = 4 the value 'h' has no size along axis 0: n/2 - 3 is -1")
        ):
            program(x=np.ones(4, np.float32))
        with pytest.raises(InputError, match=re.escape("'n/2 - 3' is 1/2, not a whole number")):
            program(x=np.ones(7, np.float32))


def test_a_broken_promise_names_the_value(tmp_path: Path) -> None:
    graphs = [
        f"rank0 (float[n, 3] x) => () <float[n, 3] h> {{ h = Concat <axis = 0> (x, x) {send('h', 1, 0)} }}",
        f"rank1 () => (float[n, 3] y) <float[n, 3] h> {{ {recv('h', 0, 0)} y = Neg(h) }}",
    ]
    with load_local(write(tmp_path, graphs)) as program, pytest.raises(RankError) as caught:
        program(x=np.ones((4, 3), np.float32))
    assert "rank 0 failed in Concat (net.h): the value 'h' was promised with shape {4,3} and has {8,3}" in str(
        caught.value
    )


GATHER = [
    f"""rank0 (float[n, 3] x, int64[k] index) => (float[k, 3] y) <float[n, 3] h, float[k, 3] g>
    {{ h = Neg(x) {send("h", 1, 0)} {send("index", 1, 1)} {recv("g", 2, 3)} y = Neg(g) }}""",
    f"""rank1 () => () <float[n, 3] h, int64[k] index, float[k, 3] f>
    {{ {recv("h", 0, 0)} {recv("index", 0, 1)} f = Gather(h, index) {send("f", 2, 2)} }}""",
    f"rank2 () => () <float[k, 3] f, float[k, 3] g> {{ {recv('f', 1, 2)} g = Abs(f) {send('g', 0, 3)} }}",
]


def test_a_rank_that_fails_ends_the_step_for_all_and_the_next_step_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    with load_local(write(tmp_path, GATHER)) as program:
        for _ in range(2):
            with pytest.raises(RankError) as caught:
                program(x=x, index=np.array([1, 77]))
            assert str(caught.value).startswith("rank 1 failed in Gather (net.f): ")
            assert "77" in str(caught.value)
            assert program(x=x, index=np.array([1, 4]))["y"].tolist() == [[-3, -4, -5], [-12, -13, -14]]
    assert "has waited" not in capfd.readouterr().err


def test_ranks_that_wait_for_each_other_are_named(tmp_path: Path) -> None:
    """Each sends only what it made of what the other sends."""
    graphs = [
        f"rank0 (float[n] x) => (float[n] b) <float[n] a> {{ {recv('b', 1, 1)} a = Add(b, x) {send('a', 1, 0)} }}",
        f"rank1 () => () <float[n] a, float[n] b> {{ {recv('a', 0, 0)} b = Neg(a) {send('b', 0, 1)} }}",
    ]
    with load_local(write(tmp_path, graphs)) as program, pytest.raises(RankError) as caught:
        program(x=np.ones(3, np.float32))
    assert str(caught.value) == (
        "no rank can go on: what they wait for is never sent\n"
        "  rank 0 waits in Recv of 'b' from rank 1 (net.b)\n"
        "  rank 1 waits in Recv of 'a' from rank 0 (net.a)\n"
        "  help: compile again"
    )


TWO_INPUTS = [
    f"rank0 (float[batch, 3] x) => () <float[batch, 3] h> {{ h = Neg(x) {send('h', 1, 0)} }}",
    f"rank1 (float[batch] z) => (float[batch, 3] y) <float[batch, 3] h> {{ {recv('h', 0, 0)} y = Identity(h) }}",
]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"x": (12, 3), "z": (12,)},
            "input 'x' axis 0 is 12\n  'batch' is 8*N with N at least 1, at most 512\n  help: 8 or 16 would do",
        ),
        (
            {"x": (520, 3), "z": (520,)},
            "input 'x' axis 0 is 520\n  'batch' is 8*N with N at least 1, at most 512\n  help: 512 would do",
        ),
        (
            {"x": (0, 3), "z": (0,)},
            "input 'x' axis 0 is 0\n  'batch' is 8*N with N at least 1, at most 512\n  help: 8 would do",
        ),
        (
            {"x": (8, 3), "z": (16,)},
            "input 'z' axis 0 is 16, but 'batch' is 8 by input 'x' axis 0\n  the two must be equal",
        ),
        ({"x": (8, 4), "z": (8,)}, "input 'x' axis 1 is 4, the model was compiled for 3"),
        ({"x": (8,), "z": (8,)}, "input 'x': has 1 axes, shape (8,); the model takes 2: [batch, 3]"),
        ({"x": (8, 3)}, "the input 'z' is missing\n  help: the model's inputs are 'x', 'z'"),
        (
            {"w": (8, 3)},
            "the model has no input 'w'\n  help: its inputs are 'x', 'z'\nthe input 'x' is missing\n"
            "  help: the model's inputs are 'x', 'z'\nthe input 'z' is missing\n  help: the model's inputs are 'x', 'z'",
        ),
    ],
)
def test_bad_inputs_are_refused_whole(tmp_path: Path, inputs: dict[str, Sequence[int]], message: str) -> None:
    symbols = {"batch": SymbolRecord(divisor=8, max=512)}
    with load_local(write(tmp_path, TWO_INPUTS, symbols)) as program:
        with pytest.raises(InputError) as caught:
            program({name: np.ones(shape, np.float32) for name, shape in inputs.items()})
        assert str(caught.value) == message
        for batch in (8, 16, 64, 512):
            x, z = np.ones((batch, 3), np.float32), np.ones(batch, np.float32)
            assert program(x=x, z=z)["y"].shape == (batch, 3)


def test_wrong_types_are_refused_not_converted(tmp_path: Path) -> None:
    with load_local(write(tmp_path, TWO_INPUTS)) as program, pytest.raises(InputError) as caught:
        program(x=np.ones((2, 3)), z=[1.0, 2.0])
    assert str(caught.value) == (
        "input 'x': is of float64, the model takes float32\n  help: convert it: .astype('float32')\n"
        "input 'z': is of float64, the model takes float32\n  help: convert it: .astype('float32')"
    )


def test_an_object_that_cannot_become_an_array_is_refused_by_all(tmp_path: Path) -> None:
    class Odd:
        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise RuntimeError("it requires grad")

    with load_local(write(tmp_path, PING_PONG)) as program:
        with pytest.raises(InputError, match="input 'x': a Odd is not an array: it requires grad"):
            program(x=Odd())
        assert program(x=np.full((1, 3), 2, np.float32))["y"].tolist() == [[-1.0] * 3]


def test_a_segment_of_weights_alone_gives_the_same_in_every_step(tmp_path: Path) -> None:
    graphs = [
        f"""rank0 () => () <float[3] v, float[3] w = {{1, 2, 3}}> {{ v = Neg(w) {send("v", 1, 0)} }}""",
        f"rank1 (float[n, 3] x) => (float[n, 3] y) <float[3] v> {{ {recv('v', 0, 0)} y = Mul(x, v) }}",
    ]
    with load_local(write(tmp_path, graphs)) as program:
        for batch in (2, 5, 2):
            assert program(x=np.ones((batch, 3), np.float32))["y"].tolist() == [[-1.0, -2.0, -3.0]] * batch


def test_a_session_of_the_users_own_still_works_beside_a_program(tmp_path: Path) -> None:
    """Nothing of onnxruntime that is for all of the process is set."""
    folder = write(tmp_path, PING_PONG)
    script = f"""
import numpy, onnxruntime
from partc.runtime import load_local
with load_local({str(folder)!r}, threads=4):
    onnxruntime.InferenceSession({str(folder / "rank_0000.onnx")!r}.replace("rank_0000", "own"))
"""
    import onnx
    from onnx import helper

    value = helper.make_tensor_value_info("x", 1, ["n"])
    own = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])], "own", [value], [helper.make_tensor_value_info("y", 1, ["n"])]
    )
    onnx.save(helper.make_model(own, ir_version=11, opset_imports=[helper.make_opsetid("", 21)]), folder / "own.onnx")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_failure_while_ranks_connect_reaches_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from partc.runtime.execution.program import Program

    def connect(self: Program) -> None:
        if self.rank == 1:
            raise ValueError("no way")
        self._transport.all_reduce_max(np.zeros(1, np.int64))

    monkeypatch.setattr(Program, "connect", connect)
    with pytest.raises(ValueError, match="no way"):
        load_local(write(tmp_path, PING_PONG))


def test_swapped_byte_order_is_the_same_type(tmp_path: Path) -> None:
    with load_local(write(tmp_path, PING_PONG)) as program:
        assert program(x=np.full((1, 3), 2, ">f4"))["y"].tolist() == [[-1.0] * 3]
