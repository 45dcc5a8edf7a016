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

The formulas are rows of `plan/training/optimizer_table.py`, which says how a body is written, and of `PARTS`.

The functions of updates that need sums over all of a parameter, one row for each part: before a sum, between sums, and after.

Bodies are written as in `plan/training/optimizer_table.py`. What is made of shards and numbers alone is element-wise; sums are not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx
import onnx.parser
from partc.compiler.plan.training.optimizer_kind import ByRows, Form, OptimizerKind
from partc.compiler.plan.training.optimizer_table import APPLY, CORRECTED, MEAN, OPTIMIZERS, RATE, SQUARE
from partc.runtime.artifact.format import OPTIMIZER
from partc.runtime.artifact.graph.row_function import IDS, MERGE, ROWS, merge_function


@dataclass(frozen=True)
class Family:
    """A function in all its variants; `coupled`: weight decay is added to the gradient, and the body need not speak of it.

    `tables`: the inputs of which rows are updated, where the gradient comes as rows; `looked_up`: the body is that of these rows.
    """

    doc: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    coupled: bool = False
    tables: tuple[str, ...] = ()
    looked_up: bool = False

    @property
    def decays(self) -> bool:
        """Whether weight decay makes it another function."""
        return self.coupled or any(line.lstrip().startswith("+ ") for line in self.body.splitlines())


_SQUARES = "the sums of the squares of both, as one vector of 2; of a cut parameter they are terms of a sum"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _squares(other: str) -> str:
    """Rows are added first, since one sum over millions of elements is not exact (`MOST_AT_ONCE`)."""
    return f"""
        axes = Constant <value_ints: ints = [0]> ()
        last = Constant <value_ints: ints = [-1]> ()
        parameter_parts = Unsqueeze (parameter, axes)
        other_parts = Unsqueeze ({other}, axes)
        parameter_rows = ReduceSumSquare <keepdims: int = 0> (parameter_parts, last)
        other_rows = ReduceSumSquare <keepdims: int = 0> (other_parts, last)
        parameter_square = ReduceSum <keepdims: int = 0> (parameter_rows)
        other_square = ReduceSum <keepdims: int = 0> (other_rows)
        parameter_entry = Unsqueeze (parameter_square, axes)
        other_entry = Unsqueeze (other_square, axes)
        squares = Concat <axis: int = 0> (parameter_entry, other_entry)
        """


_NORMS = """
        norms = Sqrt (squares)
        parameter_norm, other_norm = Split <axis: int = 0, num_outputs: int = 2> (norms)
"""
_IF_BOTH = """
        lesser = Min (parameter_norm, other_norm)
        both = Greater (lesser, @0)
        chosen = Where (both, quotient, @1)
        ratio = Squeeze (chosen)
"""
_DIRECTION = """
        eps_square = Mul (@eps1, @eps1)
        floored = Max (estimate, eps_square)
        root = Sqrt (floored)
        direction = Div (g, root)
"""

PARTS = {
    "ClipScale": Family(
        "what gradients are multiplied with so that their norm, of which `total` is the square, is at most max_norm, "
        "as torch.nn.utils.clip_grad_norm_",
        ("total",),
        ("scale",),
        """
        norm = Sqrt (total)
        divisor = Add (norm, @small)
        quotient = Div (@max_norm, divisor)
        scale = Min (quotient, @1)
        """,
    ),
    "LambDirection": Family(
        "d = m'/bias1 / (sqrt(v'/bias2) + eps) + weight_decay w, the direction of LAMB (You et al. 2020, algorithm 2)",
        ("parameter", "gradient", *_MOMENTS, "bias1", "bias2"),
        ("direction", "exp_avg_next", "exp_avg_sq_next"),
        f"""{MEAN}{SQUARE}{CORRECTED}
        - direction = Mul (quotient, correction)
        + corrected = Mul (quotient, correction)
        + decay = Mul (parameter, @weight_decay)
        + direction = Add (corrected, decay)
        """,
    ),
    "LambSquares": Family(_SQUARES, ("parameter", "direction"), ("squares",), _squares("direction")),
    "LambRatio": Family(
        "|w| / |d|, 1 where either is 0, at most max_ratio",
        ("squares",),
        ("ratio",),
        f"""{_NORMS}
        unbounded = Div (parameter_norm, other_norm)
        quotient = Min (unbounded, @max_ratio)
        {_IF_BOTH}""",
    ),
    "LambApply": Family(
        "w' = w - lr ratio d",
        ("parameter", "direction", "ratio", "lr"),
        ("parameter_next",),
        f"""{RATE}
        step = Mul (rate, ratio)
        change = Mul (direction, step)
        parameter_next = Sub (parameter, change)
        """,
    ),
    "LarsSquares": Family(_SQUARES, ("parameter", "gradient"), ("squares",), _squares("g")),
    "LarsRatio": Family(
        "trust_coefficient |w| / (|g| + weight_decay |w| + eps), 1 where |w| or |g| is 0 (You et al. 2017)",
        ("squares",),
        ("ratio",),
        f"""{_NORMS}
        - divisor = Add (other_norm, @eps)
        + pulled = Mul (parameter_norm, @weight_decay)
        + both_norms = Add (other_norm, pulled)
        + divisor = Add (both_norms, @eps)
        trusted = Mul (parameter_norm, @trust_coefficient)
        quotient = Div (trusted, divisor)
        {_IF_BOTH}""",
    ),
    "LarsApply": Family(
        "m' = momentum m + lr ratio (g + weight_decay w); w' = w - m'",
        ("parameter", "gradient", "momentum", "ratio", "lr"),
        ("parameter_next", "momentum_next"),
        f"""{RATE}
        step = Mul (rate, ratio)
        weight ~ step
        change = Mul (g, weight)
        old = Mul (momentum, @momentum)
        momentum_next = Add (old, change)
        parameter_next = Sub (parameter, momentum_next)
        """,
        coupled=True,
    ),
    "RowAdagradMeans": Family(
        "the mean of the squares of each row; of a cut row they are terms of it",
        ("parameter", "gradient"),
        ("row_means",),
        """
        shape = Shape (g)
        rank = Size (shape)
        first = Constant <value_int: int = 1> ()
        but_first = Range (first, rank, first)
        row_sums = ReduceSumSquare <keepdims: int = 1> (g, but_first)
        row_means = Div (row_sums, @row)
        """,
        coupled=True,
    ),
    "RowAdagradSum": Family(
        "s' = s + means, which is at least 0; `current` is the same for those that read it in this step",
        ("sum", "means"),
        ("current", "sum_next"),
        """
        current = Add (sum, means)
        sum_next = Max (current, @0)
        """,
    ),
    "RowAdagradDirection": Family(
        "d = g / (sqrt(s') + eps), s' being one number a row",
        ("parameter", "gradient", "current"),
        ("direction",),
        """
        root = Sqrt (current)
        divisor = Add (root, @eps)
        shape = Shape (g)
        spread = Expand (divisor, shape)
        direction = Div (g, spread)
        """,
        coupled=True,
    ),
    "RowAdagradApply": Family(
        "w' = w - lr d",
        ("parameter", "direction", "lr"),
        ("parameter_next",),
        f"""{RATE}
        change = Mul (direction, rate)
        parameter_next = Sub (parameter, change)
        """,
    ),
    "AdafactorMeans": Family(
        "the means of the squares of each row and of each column, the last two dims; of a cut parameter they are terms of these",
        ("gradient",),
        ("row_means", "column_means"),
        """
        last = Constant <value_ints: ints = [-1]> ()
        last_but_one = Constant <value_ints: ints = [-2]> ()
        row_sums = ReduceSumSquare <keepdims: int = 1> (g, last)
        row_means = Div (row_sums, @columns)
        column_sums = ReduceSumSquare <keepdims: int = 1> (g, last_but_one)
        column_means = Div (column_sums, @rows)
        """,
    ),
    "AdafactorMoment": Family(
        "v' = v + forget (means - v), which is at least 0; `current` is the same for those that read it in this step",
        ("moment", "means", "forget"),
        ("current", "moment_next"),
        """
        gap = Sub (means, moment)
        moved = Mul (gap, forget)
        current = Add (moment, moved)
        moment_next = Max (current, @0)
        """,
    ),
    "AdafactorTotal": Family(
        "the sum over rows; of a cut parameter a term of it",
        ("row_var",),
        ("total",),
        """
        last_but_one = Constant <value_ints: ints = [-2]> ()
        total = ReduceSum <keepdims: int = 1> (row_var, last_but_one)
        """,
    ),
    "AdafactorDirection": Family(
        "d = g / sqrt(max(r c / max(mean of r, eps1), eps1 eps1)), as torch.optim.Adafactor",
        ("gradient", "row_var", "col_var", "total"),
        ("direction",),
        f"""
        mean = Div (total, @rows)
        bounded = Max (mean, @eps1)
        share = Div (row_var, bounded)
        estimate = MatMul (share, col_var)
        {_DIRECTION}""",
    ),
    "AdafactorVector": Family(
        "v' = v + forget (g g - v); d = g / sqrt(max(v', eps1 eps1)), as torch.optim.Adafactor for what is no matrix",
        ("gradient", "variance", "forget"),
        ("direction", "variance_next"),
        f"""
        square = Mul (g, g)
        gap = Sub (square, variance)
        moved = Mul (gap, forget)
        variance_next = Add (variance, moved)
        {_DIRECTION.replace("estimate", "variance_next")}""",
    ),
    "AdafactorSquares": Family(_SQUARES, ("parameter", "direction"), ("squares",), _squares("direction")),
    "AdafactorRatio": Family(
        "max(eps2, rms of w) / max(1, rms of d / d), as torch.optim.Adafactor",
        ("squares",),
        ("ratio",),
        """
        means = Div (squares, @elements)
        norms = Sqrt (means)
        parameter_norm, other_norm = Split <axis: int = 0, num_outputs: int = 2> (norms)
        size = Max (parameter_norm, @eps2)
        excess = Div (other_norm, @d)
        divisor = Max (excess, @1)
        quotient = Div (size, divisor)
        ratio = Squeeze (quotient)
        """,
    ),
    "AdafactorApply": Family(
        "w' = w (1 - lr weight_decay) - min(lr, bound) ratio d",
        ("parameter", "direction", "ratio", "lr", "bound"),
        ("parameter_next",),
        f"""{RATE}
        bounded = Min (rate, bound)
        step = Mul (bounded, ratio)
        change = Mul (direction, step)
        {APPLY}""",
    ),
}


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
