"""Random graphs of what is risky with random plans: inputs that are outputs, weights used in several ways, strings, sequences, dims of 0,
functions, loops, captured values, unknown shapes, names as partc derives them; groups that overlap, and ranks in any order. A quarter
of the plans train (`random_losses.py`).

    python tests/fuzz/random_cases.py --cases 3000 --seed 1 --save failures/

Prints how many cases are equal to the unsharded model, or learn as it does, refused by the compile (and why), and wrong: refused by
the runtime or by `partc check`, different, or a traceback. A wrong case is saved as a folder with its model, plan and inputs.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from partc.compiler.errors import CompileError
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from partc.runtime.errors import PartcError

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from equivalence import compiled, same, whole_outputs
from random_losses import LOSS, train, with_loss
from test_random_placement import Builder

EQUAL, REFUSED = "equal", "refused by the compile"
WRONG = ("refused by the runtime", "refused by check", "different", "traceback", "the compile's own fault")
DERIVED = (
    ".shape",
    ".begin",
    ".partial",
    ".grad",
    "@[2, 1]",
    "@[1, 1]",
    "@[1, 2]",
    ".allgather",
    ".to.1",
    "@[1]",
    ".next",
)
KINDS = (
    "loop",
    "weight",
    "dequantized",
    "zero",
    "sequence",
    "function",
    "found",
    "captured",
    "sized",
    "text",
    "terms",
    *["plain"] * 8,
)
CALLING = ("If", "Loop", "Twice")
FLOAT, WIDE, RECORDS = TensorProto.FLOAT, 6, 12


@dataclass(frozen=True)
class Case:
    """A model, the text of its plan, and the inputs of its steps."""

    model: onnx.ModelProto
    plan: str

    def steps(self) -> list[dict[str, Any]]:
        """Numbers, and texts, for the inputs."""
        random = np.random.default_rng(3)
        steps = []
        for b in (RECORDS, 2 * RECORDS):
            step: dict[str, Any] = {
                name: random.standard_normal((b, w), dtype=np.float32) for name, w in (("x", 3), ("z", 5))
            }
            steps.append({**step, "words": np.array([f"w{k}" for k in range(b)], object)})
        names = {port.name for port in self.model.graph.input}
        return [{name: value for name, value in step.items() if name in names} for step in steps]


class Risky(Builder):
    """Grows what `Builder` does, and what is risky; `outputs` are values of other shapes that are delivered."""

    def __init__(self, draw: st.DrawFn) -> None:
        super().__init__(draw)
        self.outputs: list[tuple[str, int]] = []
        self.text = ""
        self.called = False
        self.rows: list[str] = []
        """Products that are to be cut in what they sum over."""

    def add(self, op: str, inputs: list[str], outputs: int = 1, **attributes: object) -> list[str]:
        names = super().add(op, inputs, outputs, **attributes)
        if self.values and self.draw(st.integers(0, 4)) == 0:  # a name as partc makes one
            name = self.pick()[0] + self.draw(st.sampled_from(DERIVED))
            if not any(name in node.output for node in self.nodes):
                names[0] = self.nodes[-1].output[0] = name
        return names

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The sizes that dims of operands are multiples of, of those of which it is known here."""
        known = {name: [RECORDS, width] for name, width in self.values}
        return known | {tensor.name: list(tensor.dims) for tensor in self.weights}

    def floats(self, *shape: int) -> str:
        """A weight, of earlier ones now and then."""
        known = [tensor.name for tensor in self.weights if list(tensor.dims) == [*shape] and tensor.data_type == FLOAT]
        if known and self.draw(st.booleans()):
            return self.draw(st.sampled_from(known))
        return self.constant(np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape))

    def risk(self) -> None:
        name, width = self.pick()
        match self.draw(st.sampled_from(KINDS)):
            case "plain":
                self.grow()
                return
            case "loop":
                (out, *_) = self.add("Loop", [self.constant(np.array(2)), "", name], body=_turn(self.pick(width)[0]))
            case "weight":
                (made,) = self.add(self.draw(st.sampled_from(["Tanh", "Ceil", "Neg"])), [self.floats(width)])
                self._maybe_output(made, 1)
                (out,) = self.add("Add", [name, made])
            case "dequantized":
                table = self.constant(np.arange(-width * WIDE, width * WIDE, 2, dtype=np.int8).reshape(width, WIDE))
                (made,) = self.add("DequantizeLinear", [table, self.constant(np.array(0.0625, np.float32))])
                self._maybe_output(made, 2)
                (turned,) = self.add("Transpose", [made], perm=[1, 0])
                (square,) = self.add("MatMul", [made, turned])
                (out,) = self.add("MatMul", [name, square])
            case "zero":
                bounds = [self.constant(np.array([k], np.int64)) for k in (0, 0, 1)]
                (none,) = self.add("Slice", [name, *bounds])
                self._maybe_output(none, 2)
                (out,) = self.add("Concat", [none, name], axis=1)
            case "sequence":
                (many,) = self.add("SequenceConstruct", [name, self.pick(width)[0]])
                (out,) = self.add("SequenceAt", [many, self.constant(np.array(self.draw(st.integers(0, 1))))])
            case "function":
                self.called = True
                (out,) = self.add("Twice", [name, self.pick(width)[0]], domain="own")
            case "found":
                (places,) = self.add("NonZero", self.add("Relu", [name]))
                (out,) = self.add("Identity", [name])
                for op in self.draw(st.sampled_from([(), ("Neg",), ("Transpose",), ("Transpose", "Neg"), ("Shape",)])):
                    (places,) = self.add(op, [places])
                self.outputs.append((places, TensorProto.INT64))
            case "terms":
                out = self.terms(name, width)
            case "captured":
                flag = self.add(
                    "Less", [*self.add("ReduceMax", [name], keepdims=0), self.constant(np.array(0.5, np.float32))]
                )
                (out,) = self.add(
                    "If", flag, then_branch=_nested(name, self.floats(width)), else_branch=_nested(name, name)
                )
            case "sized":
                (shape,) = self.add("Shape", [name], start=0, end=1)
                (number,) = self.add("Cast", [shape], to=FLOAT)
                self.outputs += [(shape, TensorProto.INT64)] if self.draw(st.booleans()) else []
                (out,) = self.add("Div", [name, number])
            case _:
                (self.text,) = self.add("Identity", [self.text or "words"])
                self.outputs.append((self.text, TensorProto.STRING))
                (out,) = self.add("Abs", [name])
        self.values.append((out, width))

    def terms(self, name: str, width: int) -> str:
        """Sums of products, whose terms pass through what is linear, joined with what is whole."""
        found = []
        for _ in range(self.draw(st.integers(1, 3))):
            (wide,) = self.add("MatMul", [name, self.floats(width, RECORDS)])
            (bent,) = self.add("Tanh", [wide])
            (out,) = self.add("MatMul", [bent, self.floats(RECORDS, width)])
            self.rows.append(self.nodes[-1].name)
            match self.draw(st.sampled_from(["", "bias", "scaled", "turned", "records", "shared", "neg"])):
                case "bias":
                    (out,) = self.add("Add", [out, self.floats(width)])
                case "scaled":
                    (out,) = self.add(
                        self.draw(st.sampled_from(["Mul", "Div"])), [out, self.constant(np.array(3, np.float32))]
                    )
                case "turned":
                    (turned,) = self.add("Transpose", [out], perm=[1, 0])
                    (out,) = self.add("Transpose", [turned], perm=[1, 0])
                case "records":
                    (mean,) = self.add("ReduceMean", [out, self.constant(np.array([0], np.int64))], keepdims=1)
                    (out,) = self.add("Sub", [out, mean])
                case "shared":
                    self.values.append((out, width))
                case "neg":
                    (out,) = self.add("Neg", [out])
            found.append(out)
        (out,) = self.add("Sum", [*found, self.pick(width)[0]] if self.draw(st.booleans()) else found)
        for _ in range(self.draw(st.integers(0, 2))):
            (out,) = self.add(self.draw(st.sampled_from(["Add", "Sub", "Add", "Max"])), [out, self.pick(width)[0]])
        return out

    def _maybe_output(self, name: str, rank: int) -> None:
        if self.draw(st.integers(0, 2)) == 0:
            self.outputs.append((name, FLOAT))


def _turn(captured: str) -> onnx.GraphProto:
    ports = [
        ("i", TensorProto.INT64),
        ("go", TensorProto.BOOL),
        ("state", FLOAT),
        ("going", TensorProto.BOOL),
        ("after", FLOAT),
    ]
    i, go, state, going, after = (
        helper.make_tensor_value_info(name, kind, [] if len(name) < 3 or name == "going" else None)
        for name, kind in ports
    )
    nodes = [
        helper.make_node("Identity", ["go"], ["going"], name="go"),
        helper.make_node("Sub", ["state", captured], ["after"], name="turn"),
    ]
    return helper.make_graph(nodes, "turns", [i, go, state], [going, after])


def _nested(name: str, other: str) -> onnx.GraphProto:
    inner = helper.make_node("Add", [name, other], ["inner.shape"], name="inner")
    last = helper.make_node("Mul", ["inner.shape", name], ["out"], name="last")
    return helper.make_graph([inner, last], "branch", [], [helper.make_tensor_value_info("out", FLOAT, None)])


def _twice() -> onnx.FunctionProto:
    nodes = [
        helper.make_node("Add", ["a", "b"], ["h"], name="first"),
        helper.make_node("Tanh", ["h"], ["y"], name="second"),
    ]
    return helper.make_function("own", "Twice", ["a", "b"], ["y"], nodes, [helper.make_opsetid("", 21)])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    graph = Risky(draw)
    for _ in range(draw(st.integers(1, 8))):
        graph.risk()
    read = {name for node in graph.nodes for name in node.input}
    kept = [value for value in graph.values[2:] if value[0] not in read or draw(st.integers(0, 5)) == 0]
    kept += [value for value in graph.values[:2] if draw(st.integers(0, 5)) == 0] or ([] if kept else graph.values[:1])
    outputs = {name: (FLOAT, ["batch", width]) for name, width in kept}
    outputs |= {name: (kind, None) for name, kind in graph.outputs}
    learning = []
    if draw(st.integers(0, 3)) == 0:
        ends = [name for name, (kind, _) in outputs.items() if kind == FLOAT]
        learning = with_loss(draw, graph, ends)
        outputs[LOSS] = (FLOAT, [])
    inputs = [helper.make_tensor_value_info(name, FLOAT, ["batch", width]) for name, width in (("x", 3), ("z", 5))]
    if graph.text:
        inputs.append(helper.make_tensor_value_info("words", TensorProto.STRING, ["batch"]))
    ports = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()]
    proto = helper.make_model(
        helper.make_graph(graph.nodes, "risky", inputs, ports, graph.weights),
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
        functions=[_twice()] if graph.called else [],
    )
    return Case(proto, "\n".join([*_plan(draw, graph), *learning, ""]))


def _plan(draw: st.DrawFn, graph: Risky) -> list[str]:
    ranks = draw(st.sampled_from([2, 3, 4, 6]))
    lines = [f"ranks: {ranks}", f"symbols: {{batch: {{divisor: {RECORDS}}}}}"]
    lines.append(
        f"dataset: {draw(st.sampled_from(['full_batch', 'data_parallel', 'data_parallel', *(['{x: [2, 1]}'] if ranks % 2 == 0 else [])]))}"
    )
    outputs = ["", "outputs: cut", "outputs: producer", f"outputs: {ranks - 1}", f"outputs: [{ranks - 1}, 0]"]
    lines.append(draw(st.sampled_from(outputs)))
    groups = {node.name: _group(draw, ranks) for node in graph.nodes if draw(st.integers(0, 3)) == 0}
    lines += ["placement:", *(f"  {name}: {group}" for name, group in groups.items())] if groups else []
    cut = []
    for node in graph.nodes:
        size = len(groups.get(node.name, range(ranks)))
        if size > 1 and node.name in graph.rows and draw(st.integers(0, 7)):
            cut.append(
                f"  {node.name}: {draw(st.sampled_from(['rowwise', '{in: [[1, 2], [2, 1]]}' if size % 2 == 0 else 'rowwise']))}"
            )
        elif size > 1 and draw(st.integers(0, 4)) == 0:
            pieces = [n for n in range(1, size + 1) if size % n == 0]
            cut.append(f"  {node.name}: {_cut(draw, node, pieces, graph.shapes)}")
    return [*lines, *(["sharding:", *cut] if cut else [])]


def _group(draw: st.DrawFn, ranks: int) -> list[int]:
    order = draw(st.permutations(range(ranks)))
    return list(order[: draw(st.integers(1, ranks))])


def _cut(draw: st.DrawFn, node: onnx.NodeProto, pieces: list[int], shapes: dict[str, list[int]]) -> str:
    """A strategy: mostly one that the node can take, of records or by numbers that divide a size."""
    operands = [name for name in node.input if name]
    known = [k for k, name in enumerate(operands) if shapes.get(name)]
    if not known or node.op_type in CALLING or draw(st.integers(0, 7)) == 0:
        styles = ["colwise"] if node.op_type == "MatMul" else []
        return draw(st.sampled_from(["replicate", "replicate", "{out: [[2, 1]]}", *styles]))
    cuts, k = ["null"] * len(operands), draw(st.sampled_from(known))
    sizes = shapes[operands[k]]
    numbers = [1] * len(sizes)
    dim = draw(st.sampled_from([0, 0, *range(len(sizes))]))
    fitting = [n for n in pieces if sizes[dim] % n == 0]
    numbers[dim] = draw(st.sampled_from(fitting if draw(st.integers(0, 9)) else pieces))
    cuts[k] = str(numbers)
    return f"{{in: [{', '.join(cuts)}]}}"


def outcome(case: Case) -> tuple[str, str]:
    """What comes of a case, and the reason."""
    try:
        wanted = [whole_outputs(case.model, step) for step in case.steps()]
    except Exception as error:
        return "not run by onnxruntime", str(error)
    if "\ntrain:" in case.plan:
        return _tried(lambda: train(case))
    return _tried(lambda: _run(case, wanted))


def _tried(run: Callable[[], None]) -> tuple[str, str]:
    """What comes of a run, and the reason."""
    try:
        run()
    except CompileError as error:
        own = "a fault of partc itself" in str(error)
        return "the compile's own fault" if own else REFUSED, str(error)
    except Refused as error:
        return "refused by check", str(error)
    except PartcError as error:
        return "refused by the runtime", str(error)
    except AssertionError as error:
        return "different", str(error)
    except Exception:
        return "traceback", traceback.format_exc()
    return EQUAL, ""


class Refused(Exception):
    """The checker does not accept what was written."""


def _run(case: Case, wanted: list[dict[str, Any]]) -> None:
    """Compiles and runs on all ranks, and compares with the outputs of the unsharded model."""
    with tempfile.TemporaryDirectory() as name:
        build = Path(name) / "build"
        compiled(case.model, case.plan, build)
        if found := check_artifact(build):
            raise Refused("\n".join(map(str, found)))
        with load_local(build) as ranks:
            for step, want in zip(case.steps(), wanted, strict=True):
                have = ranks(step)
                assert set(have) == set(want), f"outputs {sorted(have)}"
                for output, value in want.items():
                    same(have[output], value, output, 1e-5, 1e-5)


def reason(text: str) -> str:
    """A refusal's kind: its fact without names and numbers."""
    line = text.splitlines()[0].split(": ", 1)[-1] if text else ""
    return re.sub(r"'[^']*'|\[[^\]]*\]|\([^)]*\)|\S*[\d@]\S*", "_", line)[:100]


def save(case: Case, folder: Path, what: str, text: str) -> None:
    """Writes a case as files: what a user would run."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(case.model, folder / "model.onnx")
    (folder / "model.txt").write_text(onnx.printer.to_text(case.model))
    (folder / "plan.yaml").write_text(case.plan)
    (folder / "output.txt").write_text(f"{what}\n{text}\n")
    for k, step in enumerate(case.steps()):
        np.savez(folder / f"inputs_{k}.npz", **step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, default=Path("failures"))
    options = parser.parse_args()
    counts, why = Counter[str](), Counter[str]()
    quiet = settings(
        max_examples=options.cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @seed(options.seed)
    @quiet
    @given(cases())
    def run(case: Case) -> None:
        what, text = outcome(case)
        counts[what] += 1
        if what == REFUSED:
            why[reason(text)] += 1
        elif what != EQUAL:
            save(case, options.save / f"{what.replace(' ', '_')}_{options.seed}_{counts.total()}", what, text)

    run()
    for what, count in counts.most_common():
        print(f"{count:6d}  {what}")
    for text, count in why.most_common(40):
        print(f"{count:6d}    {text}")
    raise SystemExit(any(counts[what] for what in WRONG))


if __name__ == "__main__":
    main()
