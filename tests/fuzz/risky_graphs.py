"""Random graphs of risky constructions: bodies, functions, captured values, derived names, unknown shapes, sequences and strings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper
from random_placement_case import Builder

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
                if self.draw(st.booleans()):
                    (square,) = self.add("Trilu", [square])
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


def twice() -> onnx.FunctionProto:
    nodes = [
        helper.make_node("Add", ["a", "b"], ["h"], name="first"),
        helper.make_node("Tanh", ["h"], ["y"], name="second"),
    ]
    return helper.make_function("own", "Twice", ["a", "b"], ["y"], nodes, [helper.make_opsetid("", 21)])
