"""Optimizers as model-local functions of plain ONNX ops, element by element, in as few passes over memory as their formulas allow.

A function takes the parameter, its gradient, the slots (what the optimizer keeps, of the parameter's shape) and rank-0 float32 scalars
that change from step to step; it gives the next parameter and slots:

    parameter_next, momentum_next = partc.optimizer.Momentum(parameter, gradient, momentum, lr) {momentum, lr_multiplier}

Suffixes, in this order, name what else a function does, so that nobody pays a pass for what is not asked:

    Scaled    the gradient is multiplied with the scalar `scale`, an input after `lr`, before anything else
    Clipped   then it is kept within `clip_value` of 0
    Decayed   `weight_decay` is at work
    Double    parameter, gradient and slots are float64; attributes and scalars are float32 all the same

Before them `Rows` says that the gradient comes as ids and rows, and that only these rows of the parameter and the slots are updated, each
id once (`MergeRows`; `SgdRows` adds, and takes an id several times):

    parameter_next, momentum_next = partc.optimizer.MomentumRows(parameter, momentum, ids, rows, lr) {momentum, lr_multiplier}

The formulas are rows of `plan/training/optimizer_table.py`, which says how a body is written, and of `whole_functions.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx
import onnx.parser
from partc.compiler.plan.training.optimizer_kind import ByRows, Form, OptimizerKind
from partc.compiler.plan.training.optimizer_table import OPTIMIZERS
from partc.compiler.training.whole_functions import PARTS, Family
from partc.runtime.artifact.format import OPTIMIZER
from partc.runtime.artifact.graph.row_function import IDS, MERGE, ROWS, merge_function

DOMAIN = OPTIMIZER
DOMAIN_VERSION = 1
OPSET = 21
_VARIANTS = ("Scaled", "Clipped", "Decayed", "Double")
_FED = ("lr", "scale", "bias1", "bias2", "forget", "bound")
_NEXT = "_next"
_LITERALS = {"0": ("zero", "0.0"), "1": ("one", "1.0"), "small": ("tiny", "1e-6")}


_PAIR = ("parameter", "gradient")


def _next(*names: str) -> tuple[str, ...]:
    return tuple(name + _NEXT for name in names)


def _of(kind: OptimizerKind, form: Form) -> Family:
    """A family that updates one parameter, from a row of the table."""
    inputs = (*_PAIR, *form.slots, *kind.scalars)
    return Family(kind.doc, inputs, _next("parameter", *form.slots), form.body, kind.coupled)


def _of_rows(kind: OptimizerKind, form: Form) -> Family:
    """The same over ids and rows."""
    tables = ("parameter", *form.slots)
    inputs = (*tables, IDS, ROWS, *kind.scalars)
    return Family(kind.doc, inputs, _next(*tables), kind.rows or form.body, kind.coupled, tables, not kind.rows)


_FORMS = [(kind, form) for kind in OPTIMIZERS.values() if kind.by_rows is not ByRows.LAZY for form in kind.forms]
_WHOLE = {form.function: _of(kind, form) for kind, form in _FORMS if form.body}
_BY_ROWS = {f"{form.function}Rows": _of_rows(kind, form) for kind, form in _FORMS if form.body or kind.rows}
FAMILIES = {**_WHOLE, **_BY_ROWS, **PARTS}
"""Maps names to functions: the function of each optimizer, the parts of those that have several, and the clipping of gradients by their
norm.
"""


def variant(
    family: str, *, scaled: bool = False, clipped: bool = False, decayed: bool = False, double: bool = False
) -> str:
    """The name of a family's function that does just this."""
    return family + "".join(
        suffix for suffix, wanted in zip(_VARIANTS, (scaled, clipped, decayed, double), strict=True) if wanted
    )


@functools.cache
def function(op_type: str, opset: int = OPSET) -> onnx.FunctionProto:
    """The function of this name, in ops of an opset from 18 on: that of the model, which onnx wants to be one. Raises KeyError."""
    if op_type == MERGE:
        return merge_function(opset)
    family, asked = op_type, set[str]()
    for suffix in reversed(_VARIANTS):
        if family not in FAMILIES and family.endswith(suffix):
            family = family.removesuffix(suffix)
            asked.add(suffix)
    row = FAMILIES[family]
    return _Writer(op_type, row, asked, opset).written()


def functions(op_types: Iterable[str], opset: int = OPSET) -> list[onnx.FunctionProto]:
    """The functions that nodes of these op types call, each once, by name."""
    return [function(op_type, opset) for op_type in sorted(set(op_types))]


@dataclass
class _Writer:
    """A family's body on its way to one function's text."""

    name: str
    row: Family
    asked: set[str]
    opset: int
    lines: list[str] = field(default_factory=list)
    attributes: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)

    def written(self) -> onnx.FunctionProto:
        scaled, clipped, decayed = ("Scaled" in self.asked, "Clipped" in self.asked, "Decayed" in self.asked)
        inputs = list(self.row.inputs)
        if scaled:
            # behind the rate, else before the other numbers
            before = next((at for at, name in enumerate(inputs) if name in _FED), len(inputs))
            inputs.insert(inputs.index("lr") + 1 if "lr" in inputs else before, "scale")
        if "Double" in self.asked:
            for name in _FED:
                if name in inputs:
                    self.add(f"{name}_double = Cast <to: int = {onnx.TensorProto.DOUBLE}> ({name})")
                    self.renamed[name] = f"{name}_double"
        self.renamed["g"] = ROWS if self.row.tables else "gradient"
        self.look_up()
        folds = scaled and not clipped and not (decayed and self.row.coupled)
        if scaled and not (folds and "~" in self.row.body):
            self.gradient("scaled = Mul (g, scale)")
        if clipped:
            self.add("lowest = Neg (@clip_value)")
            self.gradient("clipped = Clip (g, lowest, @clip_value)")
        if decayed and self.row.coupled:
            self.add("decay = Mul (parameter, @weight_decay)")
            self.gradient("decayed = Add (g, decay)")
        for line in filter(None, map(str.strip, self.row.body.splitlines())):
            target, tilde, value = line.partition(" ~ ")
            if tilde and folds:
                self.add(f"{target} = Mul ({value}, scale)")
            elif tilde:
                self.renamed[target] = self.constants(value)
            elif line[0] not in "+-":
                self.add(line)
            elif (line[0] == "+") == decayed:
                self.add(line[2:])
        self.put_back()
        heading = f'<domain: "{DOMAIN}", opset_import: ["" : {self.opset}]>\n{self.name} <{", ".join(self.attributes)}>'
        body = "\n".join(self.lines)
        text = f"{heading} ({', '.join(inputs)}) => ({', '.join(self.row.outputs)}) {{\n{body}\n}}"
        made = onnx.parser.parse_function(text if self.attributes else text.replace(" <>", "", 1))
        made.doc_string = self.row.doc
        return made

    def look_up(self) -> None:
        """Lets the body speak of the rows that are updated."""
        if self.row.tables:
            self.add("along = Constant <value_ints: ints = [1]> ()")
            self.add(f"places = Unsqueeze ({IDS}, along)")
        for name in self.row.tables if self.row.looked_up else ():
            self.add(f"{name}_rows = Gather ({name}, {IDS})")
        for name in self.row.tables if self.row.looked_up else ():
            self.renamed |= {name: f"{name}_rows", name + _NEXT: f"{name}_rows{_NEXT}"}

    def put_back(self) -> None:
        """Writes the rows that the body has made to where they lie."""
        for name in self.row.tables if self.row.looked_up else ():
            self.lines.append(f"{name}{_NEXT} = ScatterND ({name}, places, {name}_rows{_NEXT})")

    def gradient(self, line: str) -> None:
        """A line that makes another gradient out of `g`."""
        self.add(line)
        self.renamed["g"] = line.partition(" = ")[0]

    def add(self, line: str) -> None:
        target, _, value = line.partition(" = ")
        value = re.sub(r"\b\w+\b", lambda word: self.renamed.get(word[0], word[0]), self.constants(value))
        target = self.renamed.get(target, target) if target.endswith(_NEXT) else target
        self.lines.append(f"{target} = {value}")

    def constants(self, text: str) -> str:
        """The text with the names of constants in place of `@name`; each constant is made at its first use."""
        return re.sub(r"@(\w+)", lambda found: self.constant(found[1]), text)

    def constant(self, name: str) -> str:
        value, given = _LITERALS.get(name, (f"{name}_constant", f"@{name}"))
        if any(line.startswith(f"{value} = ") for line in self.lines):
            return value
        if name not in _LITERALS:
            self.attributes.append(name)
        made = f"Constant <value_float: float = {given}> ()"
        if "Double" in self.asked:
            self.lines.append(f"{value}_float = {made}")
            made = f"Cast <to: int = {onnx.TensorProto.DOUBLE}> ({value}_float)"
        self.lines.append(f"{value} = {made}")
        return value
