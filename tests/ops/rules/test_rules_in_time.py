"""The flow over microbatches is proven for every op: what it says of each value holds, along each factor that may have the records.

Of a training the plain node runs on every microbatch, of a stream what `in_microbatches` makes of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from partc.compiler.analysis.records import Shard
from partc.compiler.analysis.shapes import inferred
from partc.compiler.dims.facts import Facts
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Typed
from partc.compiler.ir.training import Training
from partc.compiler.ir.value_info import SymbolInfo
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import OWN as OWN_OPS
from partc.compiler.pipeline import start
from partc.compiler.plan.read import parse_plan
from partc.compiler.plan.training.optimizer import Optimizer
from partc.compiler.rewrite.in_microbatches import in_microbatches
from partc.compiler.sharding.flow import OWN, REPLICATE, Flow, Partial, State
from rows import of_today, rows
from rule_case import Array, Case, feeds_of, node_of, run
from rule_prover import equal

MODULES = [importlib.import_module(path.stem) for path in sorted(Path(__file__).parents[1].glob("rule_cases_*.py"))]
CASES: list[Case] = [one for module in MODULES for one in module.CASES if one.domain != OWN_OPS]
COUNT = 3
STREAM = f"ranks: 1\npipeline: {{microbatches: {COUNT}}}\n"
Dims = Mapping[str, int]


def programs(case: Case, plan: str, *, dynamic: bool) -> Iterator[tuple[Typed, Dims]]:
    """By factor a program of the node alone, whose operands have the records along their dims of that factor, and these dims."""
    feeds = feeds_of(case)
    for letter in rule_of(node_of(case)).factors:
        node = node_of(case, dynamic)
        inputs = [one for k, one in enumerate(rule_of(node).inputs) if k not in case.constants and node.inputs[k]]
        if any(one and one.count(letter) > 1 for one in inputs):
            continue
        along: dict[ir.Value, int] = {}
        for k, letters in enumerate(rule_of(node).inputs):
            value = node.inputs[k] if k < len(node.inputs) else None
            if value is not None and letters and letter in letters and k not in case.constants:
                along[value] = letters.index(letter)
        if not along or {feeds[str(value.name)].shape[dim] % COUNT for value, dim in along.items()} != {0}:
            continue
        for value, dim in along.items():
            assert value.shape is not None
            if dynamic:
                value.shape = ir.Shape(["batch" if at == dim else old for at, old in enumerate(value.shape.dims)])
        assert node.graph is not None
        program = start(Source(ir.Model(node.graph, ir_version=10)), parse_plan(plan, "plan.yaml"), "case")
        sizes = [size for value in node.graph.inputs if value.shape is not None for size in value.shape.dims]
        names = {str(size.value) for size in sizes if isinstance(size, ir.SymbolicDim)}
        symbols = {name: SymbolInfo(Facts(divisor=COUNT if name == "batch" else 1), "case") for name in names}
        found = inferred(program.into(Typed, training=None, symbols=symbols, values={}, batch_dims=along))
        yield found, {str(value.name): dim for value, dim in along.items()}


def microbatches(feeds: Mapping[str, Array], dims: Dims) -> list[dict[str, Array]]:
    cut = {name: np.split(feeds[name], COUNT, dim) for name, dim in dims.items()}
    return [{**feeds, **{name: some[k] for name, some in cut.items()}} for k in range(COUNT)]


def fault(state: State, parts: Sequence[Array], want: Array, close: float) -> str:
    """Why what microbatches give does not make the whole batch's value as a state says; empty if it does."""
    match state:
        case Shard(dim=dim):
            have = np.concatenate(parts, dim)
        case Partial(how="sum"):
            have = np.sum(parts, axis=0, dtype=want.dtype)
        case Partial():
            have = np.mean(parts, axis=0, dtype=want.dtype)
        case _:
            same = state is OWN or all(equal(one, want, close) for one in parts)
            return "" if same else "not the same in all microbatches"
    return "" if equal(have, want, close) else f"{state} does not hold"


def trained(case: Case) -> Iterator[str]:
    feeds = feeds_of(case)
    for program, dims in programs(case, "ranks: 1\n", dynamic=True):
        (node,) = program.model.graph
        training = Training(node.outputs[0], Optimizer(type="sgd"), {})
        flow = Flow(replace(program, training=training), COUNT)
        if flow.mixing or all(flow.state(out) is OWN for out in node.outputs):
            continue
        want = run([node], feeds, {}, case)
        twice = {name: np.concatenate([feeds[name]] * 2, dim) for name, dim in dims.items()}
        try:
            run([node], {**feeds, **twice}, {}, case)
        except Exception:
            continue  # its attributes or constants are for one size
        made = [run([node], part, {}, case) for part in microbatches(feeds, dims)]
        for k, out in enumerate(node.outputs):
            if why := fault(flow.state(out), [one[k] for one in made], want[k], case.close):
                yield f"records along {dims}: {out.name}: {why}"


def streamed(case: Case, *, dynamic: bool) -> Iterator[str]:
    feeds = feeds_of(case)
    for program, dims in programs(case, STREAM, dynamic=dynamic):
        want = run([*program.model.graph], feeds, {}, case)
        try:
            part = in_microbatches(program)
        except CompileError:
            continue
        graph = part.model.graph
        given = ((str(value.name), value.const_value) for value in graph.initializers.values())
        fixed = {name: one.numpy() for name, one in given if one is not None and name not in feeds}
        made = [run([*graph], one, fixed, case) for one in microbatches(feeds, dims)]
        for k, out in enumerate(graph.outputs):
            state = Shard(part.batch_dims[out]) if out in part.batch_dims else REPLICATE
            if why := fault(state, [one[k] for one in made], want[k], case.close):
                yield f"records along {dims}: {out.name}: {why}"


@rows("case", of_today(CASES, len(CASES) // 4), 16)
def test_what_the_flow_says_of_microbatches_holds(case: Case) -> None:
    assert [*trained(case), *streamed(case, dynamic=False), *streamed(case, dynamic=True)] == []


def test_what_needs_to_know_its_records_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flow's question whether a local form asks for its shard: of a Trilu along its rows."""
    case = next(one for one in CASES if one.op_type == "Trilu")
    assert not [*trained(case)]
    monkeypatch.setattr("partc.compiler.sharding.flow.depends_on_shard", lambda *given: False)
    assert [*trained(case)]
