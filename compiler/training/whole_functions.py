"""The functions of updates that need sums over all of a parameter, one row for each part: before a sum, between sums, and after.

Bodies are written as in `plan/training/optimizer_table.py`. What is made of shards and numbers alone is element-wise; sums are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from partc.compiler.plan.training.optimizer_table import APPLY, CORRECTED, MEAN, RATE, SQUARE


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
    return f"""
        parameter_square = ReduceSumSquare <keepdims: int = 0> (parameter)
        other_square = ReduceSumSquare <keepdims: int = 0> ({other})
        axes = Constant <value_ints: ints = [0]> ()
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
