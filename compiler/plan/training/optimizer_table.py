"""The optimizers of a plan, a row for each: its options, its slots of a parameter, and its formula in ONNX ops.

    "lion": OptimizerKind(
        "w' = w (1 - lr weight_decay) - lr sign(beta1 m + (1-beta1) g); m' = beta2 m + (1-beta2) g",
        function="Lion", options={**_LR, **_BETAS, **_DECAY}, slots=("exp_avg",), body="..."
    )

A row is all that a new optimizer needs: the function that artifacts carry, the options that a plan may give, the schema and the slots of
checkpoints follow from it. A body is text, a line a node, element by element:

    @name             the attribute of that name as a constant (an option, `one_minus_beta1`, `lr_multiplier`)
    g                 the gradient after scaling, clipping and coupled weight decay
    name ~ value      `value`, multiplied with the scalar that gradients are scaled with, where this costs no pass over the gradient
    + line, - line    a line of a function with weight decay, of one without
    key? line, !key? line    a line where an option's switch is on, or off: a function of its own then, and slots are said so, too
    name_next         what is made of the parameter or of a slot

`1 - beta` is an attribute of its own, for float32 cannot subtract 0.999 from 1 exactly enough.
"""

from __future__ import annotations

from dataclasses import replace

from partc.compiler.plan.training.optimizer_kind import ByRows, OptimizerKind, Option, Switch

MEAN = """
    weight1 ~ @one_minus_beta1
    old_mean = Mul (exp_avg, @beta1)
    new_mean = Mul (g, weight1)
    exp_avg_next = Add (old_mean, new_mean)
"""
SQUARE = """
    root_weight2 = Sqrt (@one_minus_beta2)
    weight2 ~ root_weight2
    weighted = Mul (g, weight2)
    new_square = Mul (weighted, weighted)
    old_square = Mul (exp_avg_sq, @beta2)
    exp_avg_sq_next = Add (old_square, new_square)
    root = Sqrt (exp_avg_sq_next)
"""
# m/bias1 / (sqrt(v/bias2) + eps) is sqrt(bias2)/bias1 * m / (sqrt(v) + eps*sqrt(bias2)): the corrections cost no pass.
CORRECTED = """
    root_bias = Sqrt (bias2)
    small = Mul (root_bias, @eps)
    divisor = Add (root, small)
    quotient = Div (exp_avg_next, divisor)
    correction = Div (root_bias, bias1)
"""
APPLY = """
    - parameter_next = Sub (parameter, change)
    + lost = Mul (rate, @weight_decay)
    + share = Sub (@1, lost)
    + kept = Mul (parameter, share)
    + parameter_next = Sub (kept, change)
"""
RATE = "rate = Mul (lr, @lr_multiplier)\n"
_ADAM = f"{RATE}{MEAN}{SQUARE}{CORRECTED}step = Mul (rate, correction)\nchange = Mul (quotient, step)\n"
_QUOTIENT = "quotient = Div (exp_avg_next, divisor)"
_AHEAD = f"""
    nesterov? ahead = Mul (exp_avg_next, @beta1)
    nesterov? direction = Add (ahead, new_mean)
    nesterov? quotient = Div (direction, divisor)
    !nesterov? {_QUOTIENT}
"""

_LR = {"lr": Option()}
_DECAY = {"weight_decay": Option(0.0)}
_MOMENTUM = {**_LR, "momentum": Option(0.9, below=1), **_DECAY}
_BETAS = {"betas": Option((0.9, 0.999), below=1)}
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _adam(eps: float, weight_decay: float) -> dict[str, Option]:
    return {**_LR, **_BETAS, "eps": Option(eps, positive=True), "weight_decay": Option(weight_decay)}


OPTIMIZERS = {
    "sgd": OptimizerKind(
        "w' = w - lr (g + weight_decay w), as torch.optim.SGD",
        function="Sgd",
        options={**_LR, **_DECAY},
        body=f"""{RATE}
        step ~ rate
        change = Mul (g, step)
        {APPLY}""",
        rows=f"""{RATE}
        step ~ rate
        down = Neg (step)
        change = Mul (g, down)
        parameter_next = ScatterND <reduction: string = "add"> (parameter, places, change)
        """,
        by_rows=ByRows.ALIKE,
    ),
    "momentum": OptimizerKind(
        "m' = momentum m + g; w' = w - lr m', as torch.optim.SGD with momentum, without dampening",
        function="Momentum",
        options=_MOMENTUM,
        slots=("momentum",),
        body=f"""{RATE}
        old = Mul (momentum, @momentum)
        momentum_next = Add (old, g)
        change = Mul (momentum_next, rate)
        parameter_next = Sub (parameter, change)
        """,
        coupled=True,
    ),
    "nesterov": OptimizerKind(
        "m' = momentum m + g; w' = w - lr (g + momentum m'), as torch.optim.SGD with nesterov",
        function="Nesterov",
        options=_MOMENTUM,
        slots=("momentum",),
        body=f"""{RATE}
        old = Mul (momentum, @momentum)
        momentum_next = Add (old, g)
        ahead = Mul (momentum_next, @momentum)
        direction = Add (ahead, g)
        change = Mul (direction, rate)
        parameter_next = Sub (parameter, change)
        """,
        coupled=True,
    ),
    "adagrad": OptimizerKind(
        "s' = s + g g; w' = w - lr g / (sqrt(s') + eps), as torch.optim.Adagrad",
        function="Adagrad",
        options={**_LR, "initial_accumulator": Option(0.0), "eps": Option(1e-10, positive=True), **_DECAY},
        slots=("sum",),
        initial={"sum": "initial_accumulator"},
        body=f"""{RATE}
        square = Mul (g, g)
        sum_next = Add (sum, square)
        root = Sqrt (sum_next)
        divisor = Add (root, @eps)
        quotient = Div (g, divisor)
        change = Mul (quotient, rate)
        parameter_next = Sub (parameter, change)
        """,
        coupled=True,
        by_rows=ByRows.ALIKE,
    ),
    "row_adagrad": OptimizerKind(
        "s' = s + mean of g g over a row; w' = w - lr g / (sqrt(s') + eps): Adagrad with one number a row",
        function="RowAdagrad",
        options={**_LR, "initial_accumulator": Option(0.0), "eps": Option(1e-10, positive=True), **_DECAY},
        slots=("sum",),
        matrix_slots={"sum": None},
        initial={"sum": "initial_accumulator"},
        coupled=True,
        rows=f"""{RATE}
        sum_rows = Gather (sum, ids)
        square = Mul (g, g)
        mean = ReduceMean <keepdims: int = 1> (square, along)
        sum_rows_next = Add (sum_rows, mean)
        sum_next = ScatterND (sum, places, sum_rows_next)
        root = Sqrt (sum_rows_next)
        divisor = Add (root, @eps)
        share = Div (rate, divisor)
        down = Neg (share)
        change = Mul (g, down)
        parameter_next = ScatterND <reduction: string = "add"> (parameter, places, change)
        """,
        by_rows=ByRows.ALIKE,
    ),
    "rmsprop": OptimizerKind(
        "v' = alpha v + (1-alpha) g g; d = g / (sqrt(v') + eps); w' = w - lr d; centered: v' - a' a' in place of v', "
        "where a' = alpha a + (1-alpha) g; with momentum: m' = momentum m + d; w' = w - lr m', as torch.optim.RMSprop",
        function="RmsProp",
        options={
            **_LR,
            "alpha": Option(0.99, below=1),
            "eps": Option(1e-8, positive=True),
            "momentum": Option(0.0, below=1),
            "centered": Option(False),
            **_DECAY,
        },
        slots=("square_avg", "centered? grad_avg", "momentum? momentum"),
        switches={"centered": Switch("Centered"), "momentum": Switch("Momentum")},
        body=f"""{RATE}
        square = Mul (g, g)
        old_square = Mul (square_avg, @alpha)
        new_square = Mul (square, @one_minus_alpha)
        square_avg_next = Add (old_square, new_square)
        centered? old_mean = Mul (grad_avg, @alpha)
        centered? new_mean = Mul (g, @one_minus_alpha)
        centered? grad_avg_next = Add (old_mean, new_mean)
        centered? mean_square = Mul (grad_avg_next, grad_avg_next)
        centered? rounded = Sub (square_avg_next, mean_square)
        centered? variance = Max (rounded, @0)
        centered? root = Sqrt (variance)
        !centered? root = Sqrt (square_avg_next)
        divisor = Add (root, @eps)
        quotient = Div (g, divisor)
        momentum? old = Mul (momentum, @momentum)
        momentum? momentum_next = Add (old, quotient)
        momentum? change = Mul (momentum_next, rate)
        !momentum? change = Mul (quotient, rate)
        parameter_next = Sub (parameter, change)
        """,
        coupled=True,
    ),
    # n is read by two nodes, and both must lead to n', which takes its place: hence the 0 that is added.
    "ftrl": OptimizerKind(
        "n' = n + g g; z' = z + g - w (n'^-p - n^-p)/lr, where p is lr_power; w' = (sign(z') l1 - z') / (n'^-p/lr + 2 l2) where |z'| > l1, "
        "else 0, as TensorFlow's ApplyFtrl (McMahan et al. 2013)",
        function="Ftrl",
        options={
            "lr": Option(positive=True),
            "lr_power": Option(-0.5, negative=True),
            "l1": Option(0.0),
            "l2": Option(0.0),
            "initial_accumulator": Option(0.1, positive=True),
            **_DECAY,
        },
        slots=("accumulator", "linear"),
        initial={"accumulator": "initial_accumulator"},
        scalars=(),
        switches={"lr_power": Switch("Power", off=-0.5)},
        body="""
        square = Mul (g, g)
        lr_power? old_power = Pow (accumulator, @minus_lr_power)
        !lr_power? old_power = Sqrt (accumulator)
        nothing = Mul (old_power, @0)
        added = Add (square, nothing)
        accumulator_next = Add (accumulator, added)
        lr_power? new_power = Pow (accumulator_next, @minus_lr_power)
        !lr_power? new_power = Sqrt (accumulator_next)
        growth = Sub (new_power, old_power)
        sigma = Div (growth, @rate)
        pulled = Mul (sigma, parameter)
        pushed = Add (linear, g)
        linear_next = Sub (pushed, pulled)
        minus_l1 = Neg (@l1)
        within = Clip (linear_next, minus_l1, @l1)
        beyond = Sub (within, linear_next)
        stiffness = Div (new_power, @rate)
        twice = Add (@l2, @l2)
        divisor = Add (stiffness, twice)
        parameter_next = Div (beyond, divisor)
        """,
        coupled=True,
    ),
    "adam": OptimizerKind(
        "m' = beta1 m + (1-beta1) g; v' = beta2 v + (1-beta2) g g; w' = w - lr m'/bias1 / (sqrt(v'/bias2) + eps), as torch.optim.Adam; "
        "nesterov: beta1 m' + (1-beta1) g in place of m' there, as MindSpore's use_nesterov",
        function="Adam",
        options={**_adam(1e-8, 0.0), "nesterov": Option(False)},
        slots=_MOMENTS,
        scalars=("lr", "bias1", "bias2"),
        switches={"nesterov": Switch("Nesterov")},
        body=f"{_ADAM}parameter_next = Sub (parameter, change)".replace(_QUOTIENT, _AHEAD),
        coupled=True,
    ),
    "adamw": OptimizerKind(
        "Adam with w (1 - lr weight_decay) in place of w, as torch.optim.AdamW",
        function="AdamW",
        options=_adam(1e-8, 0.01),
        slots=_MOMENTS,
        scalars=("lr", "bias1", "bias2"),
        body=f"{_ADAM}{APPLY}",
    ),
    "adam_weight_decay": OptimizerKind(
        "AdamW without bias correction: w' = w - lr (m' / (sqrt(v') + eps) + weight_decay w), as MindSpore's nn.AdamWeightDecay",
        function="AdamWeightDecay",
        options=_adam(1e-6, 0.0),
        slots=_MOMENTS,
        body=f"""{RATE}{MEAN}{SQUARE}
        divisor = Add (root, @eps)
        quotient = Div (exp_avg_next, divisor)
        change = Mul (quotient, rate)
        {APPLY}""",
    ),
    "lamb": OptimizerKind(
        "the direction of AdamW, scaled by the norm of the parameter over that of the direction, as LAMB (You et al. 2020)",
        function="Lamb",
        options={**_adam(1e-6, 0.0), "max_ratio": Option(10.0, positive=True)},
        slots=_MOMENTS,
        scalars=("lr", "bias1", "bias2"),
    ),
    "lars": OptimizerKind(
        "m' = momentum m + lr r (g + weight_decay w); w' = w - m'; r = trust_coefficient |w| / (|g| + weight_decay |w| + eps), 1 where "
        "|w| or |g| is 0, as LARS (You et al. 2017)",
        function="Lars",
        options={
            **_MOMENTUM,
            "trust_coefficient": Option(0.001, positive=True),
            "eps": Option(1e-8, positive=True),
        },
        slots=("momentum",),
    ),
    "adafactor": OptimizerKind(
        "d = g / sqrt(v'), where of a matrix v' is the product of the means of rows and columns of g g, kept with 1 - t^beta2_decay; "
        "w' = w (1 - lr weight_decay) - min(lr, 1/sqrt(t)) max(eps2, rms w) / max(1, rms d / d) d, as torch.optim.Adafactor",
        function="Adafactor",
        options={
            **_LR,
            "beta2_decay": Option(-0.8, negative=True),
            "eps": Option((2**-23, 1e-3), positive=True),
            "d": Option(1.0, positive=True),
            **_DECAY,
        },
        slots=("variance",),
        matrix_slots={"row_var": (-1,), "col_var": (-2,)},
        scalars=("lr", "forget", "bound"),
    ),
}
"""Maps the names in a plan to the optimizers."""

OPTIMIZERS |= {
    f"lazy_{name}": replace(
        OPTIMIZERS[name],
        doc=f"{name} of the rows that a step looks up; the others, and what is kept of them, stay as they are",
        by_rows=ByRows.LAZY,
    )
    for name in ("momentum", "adam", "ftrl")
}
