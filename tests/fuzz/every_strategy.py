"""Every op alone, by every strategy that its rule allows, on two ranks or four: in inference, and in a training behind it.

    python tests/fuzz/every_strategy.py                all cases of `tests/ops`, thousands of artifacts
    python tests/fuzz/every_strategy.py --only Conv    those of one op

`partc check` must accept what was compiled, and a training must take each strategy that inference takes: with an entry for each of the
op's inputs, for each that is there, or for each that is no constant; or one of outputs. Ops without a gradient are left out of the second.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import ModelProto, helper, numpy_helper
from partc.compiler.errors import CompileError
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import Rule
from partc.runtime.checker.check import check_artifact

sys.path.extend(
    [str(path) for path in (Path(__file__).parents[1], *Path(__file__).parents[1].iterdir()) if path.is_dir()]
)

from equivalence import compiled
from rule_case import Array, Case, feeds_of, node_of, run
from rule_prover import divides

TRAIN = "train:\n  loss: {type: mean_squared, prediction: out, target: labels}\n  optimizer: {type: sgd, lr: 0.1}\n"
NO_GRADIENT = ("gradient", "no trainable parameter", "neither the loss nor a metric reads")
"""What is in the refusal of a training that no strategy would make possible."""


def model_of(this: Case) -> tuple[ModelProto, ir.Node, list[Array]]:
    """The case as a model, its node, called `op`, and what that gives."""
    feeds = feeds_of(this)
    node = node_of(this, feeds=feeds)
    node.name = "op"
    assert node.graph is not None
    return ir.to_proto(ir.Model(node.graph, ir_version=10)), node, run([node], feeds, {}, this)


def learning(proto: ModelProto, want: Array) -> ModelProto | None:
    """The model with a parameter behind the op; None where what it gives is no table of floats."""
    if want.dtype != np.float32 or want.ndim == 0 or want.shape[-1] < 2:
        return None
    found = ModelProto()
    found.CopyFrom(proto)
    found.graph.node.append(helper.make_node("Mul", ["y0", "parameter"], ["out"], name="last"))
    numbers = np.linspace(0.5, 1, want.shape[-1]).astype(np.float32)
    found.graph.initializer.append(numpy_helper.from_array(numbers, "parameter"))
    found.graph.output.append(helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, want.shape))
    return found


def strategies(this: Case, node: ir.Node, rule: Rule, cuts: Mapping[str, int]) -> list[str]:
    """The ways to write cuts of factors in a plan."""

    def entries(operands: tuple[str | None, ...]) -> list[str]:
        return ["null" if one is None else str([cuts.get(letter, 1) for letter in one]) for one in operands]

    given = [(k, text) for k, text in enumerate(entries(rule.inputs))]
    there = [(k, text) for k, text in given if node.inputs[k] is not None]
    read = [(k, text) for k, text in there if k not in this.constants]
    forms = [f"in: [{', '.join(text for _, text in one)}]" for one in (given, there, read)]
    found = forms if all(any(letter in (one or "") for one in rule.inputs) for letter in cuts) else []
    if all(any(letter in (one or "") for one in rule.outputs) for letter in cuts):
        found = [*found, f"out: [{', '.join(entries(rule.outputs))}]"]
    return list(dict.fromkeys(found))


def arrivals(this: Case, node: ir.Node, rule: Rule, cuts: Mapping[str, int]) -> str:
    """The line by which ranks are fed the shards that they read: of these the checker knows where they begin."""
    read = [
        (value, letters)
        for k, (value, letters) in enumerate(zip(node.inputs, rule.inputs, strict=True))
        if k not in this.constants
    ]
    lying = {
        value.name: [cuts.get(letter, 1) for letter in letters]
        for value, letters in read
        if value is not None and letters
    }
    some = {name: shards for name, shards in lying.items() if any(count > 1 for count in shards)}
    return f"dataset: {some}\n".replace("'", "") if some else ""


def faults(this: Case) -> Iterator[tuple[str, str]]:
    """By the plan of an artifact what is wrong with it, '' for nothing."""
    feeds = feeds_of(this)
    proto, node, want = model_of(this)
    rule, learned = rule_of(node), learning(proto, want[0])
    pairs = [((a, 2), (b, 2)) for a, b in itertools.combinations(rule.factors, 2)]
    for cuts in (*(((letter, 2),) for letter in rule.factors), *pairs):
        if not divides(rule, cuts, feeds, want):
            continue
        arriving = arrivals(this, node, rule, dict(cuts))
        for strategy in strategies(this, node, rule, dict(cuts)):
            plan = f"ranks: {2 ** len(cuts)}\n{arriving}outputs: cut\nsharding:\n  op: {{{strategy}}}\n"
            refused, wrong = outcome(proto, plan)
            yield plan, wrong
            if refused or learned is None:
                continue
            refused, wrong = outcome(learned, plan + TRAIN)
            gradient = any(word in refused for word in NO_GRADIENT)
            yield plan + TRAIN, wrong or ("" if gradient else refused)


def outcome(proto: ModelProto, plan: str) -> tuple[str, str]:
    """Why the compile refuses, and what the checker says of what it wrote."""
    with tempfile.TemporaryDirectory() as name:
        build = Path(name) / "build"
        try:
            compiled(proto, plan, build)
        except CompileError as error:
            return str(error), str(error) if "a bug in partc" in str(error) else ""
        return "", "\n".join(map(str, check_artifact(build)))


def main() -> None:
    from rules_case import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the op")
    parser.add_argument(
        "--part", default="0/1", help="which of so many parts of the cases, as 0/2 and 1/2 for two processes"
    )
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    counts = Counter[str]()
    for this in [one for one in CASES if options.only in ("", one.op_type)][part::parts]:
        for plan, wrong in faults(this):
            counts["wrong" if wrong else "accepted"] += 1
            if wrong:
                print(f"--- {this}\n{plan}{wrong}", flush=True)
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()))
    raise SystemExit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
