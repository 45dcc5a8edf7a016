"""Random attributes of single ops: shards are what the op's rule claims, and gradients are the slopes of what onnxruntime computes.

    python tests/fuzz/random_ops.py --cases 2000 --seed 1
    python tests/fuzz/random_ops.py --case 17 --seed 1       one of them again

The ops are linear in their first operand x, so a gradient is proven without differences: <dy, f(x + v) - f(x)> = <dx, v>.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "ops"))

import pool
from gradient_case import gradients, node_in, numbers, proof
from partc.compiler.autodiff.builder import NoGradient
from rule_case import Case, case, run
from rule_prover import violations

SIZES = (1, 2, 4, 6, 6, 12)


def windowed(chance: random.Random) -> Case:
    """A pooling or a convolution with any strides, dilations and padding."""
    op_type = chance.choice(["AveragePool", "Conv", "ConvTranspose"])
    rank = chance.randint(1, 2)
    kernel, strides, dilations = ([chance.randint(1, most) for _ in range(rank)] for most in (3, 4, 2))
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations}
    match chance.choice(["pads", "auto_pad", "none"]):
        case "pads":
            attributes["pads"] = [chance.randrange(kernel[k % rank]) for k in range(2 * rank)]
        case "auto_pad":
            attributes["auto_pad"] = chance.choice(["VALID", "SAME_UPPER", "SAME_LOWER"])
        case _:
            pass
    x = (2, 6, *(chance.randint(5, 12) for _ in range(rank)))
    opset = chance.choice([21, 22])
    if op_type == "AveragePool":
        attributes |= {
            "kernel_shape": kernel,
            "ceil_mode": chance.randint(0, 1),
            "count_include_pad": chance.randint(0, 1),
        }
        return case(op_type, [x], attributes, opset=opset, static=True)
    attributes["group"] = group = chance.choice([1, 2, 3, 6])
    weight = (12, 6 // group, *kernel) if op_type == "Conv" else (6, 12 // group, *kernel)
    return case(op_type, [x, weight, (12,)], attributes, opset=opset, static=True)


def resized(chance: random.Random) -> Case:
    """A Resize by scales."""
    mode = chance.choice(["linear", "nearest"])
    coordinates = chance.choice(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
    scales = np.array([1, 1, *(chance.choice([0.5, 0.75, 1, 1.5, 2, 3]) for _ in range(2))], np.float32)
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    return case(
        "Resize", [(2, 6, *chance.choices(SIZES[1:], k=2)), None, None], attributes, constants={2: scales}, static=True
    )


def indexed(chance: random.Random) -> Case:
    """A look-up or a scatter, with indices from the end and, where they are added up, twice."""
    shape, axis = _shape(chance, 2), chance.randint(-2, 1)
    places = [*shape]
    places[axis] = chance.choice([1, 2, 6])
    draw = np.random.default_rng(chance.getrandbits(32))
    indices = draw.integers(-shape[axis], shape[axis], places)
    match chance.choice(["Gather", "GatherElements", "ScatterElements", "ScatterND"]):
        case "ScatterElements":
            return case("ScatterElements", [shape, indices, tuple(places)], {"axis": axis, "reduction": "add"})
        case "ScatterND":
            rows = draw.integers(-shape[0], shape[0], (6, 1))
            return case("ScatterND", [shape, rows, (6, shape[1])], {"reduction": "add"})
        case op_type:
            return case(op_type, [shape, indices], {"axis": axis})


def reshaped(chance: random.Random) -> Case:
    """A Reshape to any factors of the number of elements."""
    shape, target = _shape(chance, 4), list[int]()
    rest = math.prod(shape)
    for _ in range(chance.randint(1, 4)):
        target.append(chance.choice([factor for factor in (1, 2, 3, 4, 6, 12) if rest % factor == 0]))
        rest //= target[-1]
    target = chance.sample([*target, rest], len(target) + 1)
    return case("Reshape", [shape, None], constants={1: np.array(target)})


def summed(chance: random.Random) -> Case:
    """A sum over some dims, or a product of two operands over some letters."""
    if chance.random() < 0.5:
        axes = [axis - chance.choice([0, 3]) for axis in chance.sample(range(3), chance.randint(0, 3))]
        attributes = {name: chance.randint(0, 1) for name in ("keepdims", "noop_with_empty_axes")}
        operands = [_shape(chance, 3), None]
        return case(
            chance.choice(["ReduceSum", "ReduceMean"]),
            operands,
            attributes,
            constants={1: np.array(axes, np.int64)},
            close=1e-3,
        )
    sizes = {letter: chance.choice(SIZES[1:]) for letter in "abcde"}
    a, b = (chance.sample("abcde", chance.randint(1, 3)) for _ in range(2))
    made = [letter for letter in chance.sample("abcde", 5) if letter in {*a, *b} and chance.random() < 0.5]
    equation = f"{''.join(a)},{''.join(b)}->{''.join(made)}"
    operands = [tuple(sizes[letter] for letter in letters) for letters in (a, b)]
    return case("Einsum", operands, {"equation": equation}, close=1e-3)


KINDS = (windowed, windowed, resized, indexed, reshaped, summed)


def work(chance: random.Random, folder: Path) -> str:
    """Proves the rule and the gradient of a case; gives why it is refused, or ''."""
    drawn = chance.choice(KINDS)(chance)
    (folder / "case.txt").write_text(str(drawn))
    shown = proof(
        drawn.op_type,
        drawn.operands,
        drawn.attributes,
        constants=drawn.constants,
        opset=drawn.opset,
        static=drawn.static,
    )
    feeds = {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in numbers(shown).items()
    }
    try:
        node = node_in(shown, False, feeds)
        y = run([node], feeds, {}, drawn)[0]
    except Exception as error:
        return f"onnxruntime: {error}"
    wrong = [text for text in violations(drawn) if "cannot be proven" not in text]
    assert wrong == [], f"{drawn}: {wrong}"
    draw = np.random.default_rng(chance.getrandbits(32))
    dy, v = (draw.uniform(-1, 1, array.shape).astype(np.float32) for array in (y, feeds["x0"]))
    try:
        _, found = gradients(shown, [node], feeds, {}, {"y0.dy": dy}, single=True)
    except NoGradient as error:
        return str(error)
    moved = run([node], {**feeds, "x0": feeds["x0"] + v}, {}, drawn)[0]
    slope, expected = float((found["x0"] * v).sum()), float((dy * (moved - y)).sum())
    assert abs(slope - expected) < 1e-3 * max(1, float(np.abs(dy * (moved - y)).sum())), (
        f"{drawn}: {slope}, not {expected}"
    )
    return ""


def _shape(chance: random.Random, rank: int) -> tuple[int, ...]:
    return tuple(chance.choice(SIZES) for _ in range(rank))


if __name__ == "__main__":
    pool.main(work, (__doc__ or "").partition("\n")[0], seconds=30)
