"""The section `generate` of a proposed plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from decoders import decoder
from machines import machine
from onnx import ModelProto
from partc.compiler.cost.machine import Curve, Machine
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.generation import Generation
from partc.compiler.proposal.propose import propose
from partc.compiler.quantize import quantized


@pytest.mark.parametrize(
    ("degrees", "slots", "line"),
    [
        (Degrees(), None, "generate: {slots: 1, length: 16, chunk: 16}"),
        (Degrees(dp=2), None, "generate: {slots: 2, length: 16, chunk: 16}"),
        (Degrees(tp=2, dp=2, stages=3), None, "generate: {slots: 6, length: 16, groups: 3, chunk: 16}"),
        (Degrees(stages=2), 8, "generate: {slots: 8, length: 16, groups: 2, chunk: 16}"),
        (Degrees(dp=2, stages=2), 6, "generate: {slots: 6, length: 16, chunk: 16}"),
    ],
)
def test_groups_are_as_many_as_stages_where_they_divide_the_slots(
    degrees: Degrees, slots: int | None, line: str
) -> None:
    assert Generation.over(degrees, 16, slots).line == line


def measured(**seconds: float) -> Machine:
    """A machine on which products of 5 rows take so many times the time of one, of each kind."""
    one = machine()
    cpu = one.processors["cpu"]
    curves = {name: Curve(((2e6, 1e-3), (4e6, 1e-3), (10e6, 1e-3 * times))) for name, times in seconds.items()}
    return replace(one, processors={"cpu": replace(cpu, products={**cpu.products, **curves})})


def proposed(model: ModelProto, on: Machine | None, degrees: Degrees, slots: int | None, quantize: str = "") -> str:
    """The line `generate` of a proposal."""
    source = Source(from_proto(model, Path("model.onnx")))
    if quantize:
        source = quantized(source, parse_plan(f"ranks: 1\nquantize: {quantize}\n", "plan.yaml"), "model.onnx")
    generation = Generation.over(degrees, 64, slots)
    text, _ = propose(source, "model.onnx", degrees, None, on, generation)
    return next(line for line in text.splitlines() if line.startswith("generate:"))


DRAFTS = "generate: {slots: 1, length: 64, draft: {tokens: 4}}    # products of 5 rows take 1.08 times those of one on machine.yaml"
NONE = "generate: {slots: 1, length: 64}    # no drafts: "


def test_drafts_are_proposed_where_rows_are_nearly_free() -> None:
    fused, one = decoder(fused=True), Degrees()
    assert proposed(fused, measured(few=1.08), one, None) == DRAFTS
    assert proposed(fused, measured(few=1.08), Degrees(tp=2), None) == DRAFTS
    slow = f"{NONE}products of 5 rows take 1.12 times those of one on machine.yaml"
    assert proposed(fused, measured(few=1.12), one, None) == slow
    for bits, on, reason in (
        (4, measured(few=1.0, few_int4=1.12), "products of 5 rows take 1.12 times those of one on machine.yaml"),
        (8, measured(few=1.0, few_int4=1.0), "machine.yaml has no times of products of few rows in 8 bits"),
    ):
        assert proposed(fused, on, one, None, f'{{"**": {{bits: {bits}, block: 16}}}}') == NONE + reason
    assert proposed(fused, machine(), one, None) == f"{NONE}machine.yaml has no times of products of few rows"
    assert proposed(fused, None, one, None) == "generate: {slots: 1, length: 64}"
    many = "generate: {slots: 4, length: 64}"
    assert proposed(fused, measured(few=1.0), one, 4) == many, "which would take turns"
    cut = proposed(decoder(fused=True, window=5), measured(few=1.0), one, None)
    assert cut.startswith(f"{NONE}the cache 'past")
