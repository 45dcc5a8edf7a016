"""The symbols of a program that runs a batch in parts: what the plan promises of the whole batch, said of one part.

batch: divisible by 8, in 2 parts          a part: divisible by 4
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.analysis.records import batch_symbols, records_of
from partc.compiler.dims.facts import ANY_DIM, Facts
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Program
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.value_info import SymbolInfo
from partc.compiler.plan.training.rules import TrainRules


def part_symbols(program: Program, symbols: Mapping[str, SymbolInfo]) -> dict[str, SymbolInfo]:
    """The symbols of a program, where the first dims of records are those of a part. CompileError where a batch never has parts."""
    training = program.training
    if training is None or training.accumulate == 1 or not training.part.backward:
        return dict(symbols)
    found, problems = dict(symbols), []
    for name in sorted(batch_symbols(training_records(program)) & symbols.keys()):
        info = symbols[name]
        facts = quotient(info.facts, training.accumulate)
        if facts is None:
            fact = f"no batch of '{name}', {info.facts}, can be cut into {training.accumulate} parts"
            problems.append(
                Problem(info.where, fact, "`accumulate` says how many", f"change it, or what '{name}' may be")
            )
            continue
        found[name] = replace(info, facts=facts, parts=training.accumulate, whole=info.facts)
    if problems:
        raise CompileError(problems)
    return found


def part_facts(graph: ir.Graph, rules: TrainRules, part: ProgramKind, known: Mapping[str, Facts]) -> dict[str, Facts]:
    """As `part_symbols`, before there is a training to speak of, by the names that the model gives its dims."""
    if rules.accumulate == 1 or not part.backward:
        return dict(known)
    batch = batch_symbols(records_of(graph, rules.loss.labels))
    return {
        name: (quotient(facts, rules.accumulate) or ANY_DIM) if name in batch else facts
        for name, facts in known.items()
    }


def quotient(facts: Facts, count: int) -> Facts | None:
    """What is known of the integers whose `count`-fold is allowed; None where there are none.

    count * p == r (mod d) has a solution where g = gcd(count, d) divides r, and it is unique modulo d / g.
    """
    if facts.value is not None:
        return None if facts.value % count else Facts.constant(facts.value // count)
    common = math.gcd(count, facts.divisor)
    if facts.remainder % common:
        return None
    divisor = facts.divisor // common
    remainder = facts.remainder // common * pow(count // common, -1, divisor) % divisor if divisor > 1 else 0
    low = None if facts.min is None else -(-facts.min // count)
    high = None if facts.max is None else facts.max // count
    try:
        return Facts(divisor, remainder, low, high)
    except ValueError:
        return None


def training_records(program: Program) -> dict[ir.Value, None]:
    """The inputs of a training program that hold records."""
    train = program.plan.train
    scalars = program.training.scalars if program.training is not None else ()
    found = records_of(program.model.graph, train.loss.labels if train is not None else "")
    return {value: None for value in found if value.name not in scalars}


def of_batch(info: SymbolInfo, count: int) -> SymbolInfo:
    """A symbol of the whole batch, of which a microbatch has one of `count` equal parts."""
    facts = info.facts
    if facts.value is not None:
        return replace(info, facts=Facts.constant(facts.value * count), parts=1, whole=None)
    high = None if facts.max is None else facts.max * count
    whole = Facts(facts.divisor * count, facts.remainder * count, max(facts.min or 1, 1) * count, high)
    return replace(info, facts=whole, parts=1, whole=None)
