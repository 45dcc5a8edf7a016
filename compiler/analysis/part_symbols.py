"""The symbols of a program that runs its batch in microbatches: the plan's promises for the batch, restated for one microbatch.

batch: divisible by 8, in 2 parts          a part: divisible by 4
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir
from partc.compiler.analysis.records import batch_dims, batch_symbols
from partc.compiler.dims.facts import ANY_DIM, Facts
from partc.compiler.dims.normal import normal
from partc.compiler.dims.reading import read, symbol
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Prepared
from partc.compiler.ir.training import ProgramKind
from partc.compiler.ir.value_info import Shape, SymbolInfo
from partc.compiler.plan.rules import BatchDim
from partc.compiler.plan.training.rules import TrainRules


def part_symbols(
    program: Prepared, symbols: Mapping[str, SymbolInfo], along: Mapping[ir.Value, int]
) -> dict[str, SymbolInfo]:
    """The program's symbols, with the batch dims (`along`, by input) those of a microbatch; CompileError if the batch does not divide."""
    training = program.training
    if training is None or training.rules.accumulate == 1 or not program.kind.divides:
        return dict(symbols)
    changed, problems = dict(symbols), []
    for name in sorted(batch_symbols(along) & symbols.keys()):
        info = symbols[name]
        facts = quotient(info.facts, training.rules.accumulate)
        if facts is None:
            fact = f"no batch of '{name}', {info.facts}, can be cut into {training.rules.accumulate} parts"
            problems.append(
                Problem(info.where, fact, "`accumulate` says how many", f"change it, or what '{name}' may be")
            )
            continue
        changed[name] = replace(info, facts=facts, parts=training.rules.accumulate)
    if problems:
        raise CompileError(problems)
    return changed


def part_facts(
    graph: ir.Graph, rules: TrainRules, part: ProgramKind, said: Mapping[str, BatchDim], known: Mapping[str, Facts]
) -> dict[str, Facts]:
    """Same as `part_symbols`, before the training exists, by the model's names of the dims."""
    if rules.accumulate == 1 or not part.divides:
        return dict(known)
    batch = batch_symbols(batch_dims(graph, rules.loss.labels, said))
    return {
        name: (quotient(facts, rules.accumulate) or ANY_DIM) if name in batch else facts
        for name, facts in known.items()
    }


def quotient(facts: Facts, count: int) -> Facts | None:
    """The facts about all integers n for which count * n is allowed; None if there is no such n.

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


def of_batch(info: SymbolInfo, count: int) -> SymbolInfo:
    """Returns the symbol of the whole batch, given that of one of its `count` equal microbatches."""
    facts = info.facts
    if facts.value is not None:
        return replace(info, facts=Facts.constant(facts.value * count), parts=1)
    high = None if facts.max is None else facts.max * count
    whole = Facts(facts.divisor * count, facts.remainder * count, max(facts.min or 1, 1) * count, high)
    return replace(info, facts=whole, parts=1)


class BatchDims:
    """Dims of a microbatch in terms of the whole batch, which has `count` of them: `batch` of a microbatch is `batch/2`.

    `symbols` are those of the whole batch.
    """

    def __init__(self, symbols: Mapping[str, SymbolInfo], count: int) -> None:
        whole = {name: of_batch(info, count) for name, info in symbols.items() if info.parts > 1}
        self.symbols, self.count = {**symbols, **whole}, count
        self._known = {name: info.facts for name, info in self.symbols.items()}
        self._shares = {symbol(name): symbol(name) / count for name in whole}
        self._made: dict[tuple[str, int], int | str] = {}

    def shape(self, shape: Shape | None, along: int | None = None) -> Shape | None:
        """The shape of a microbatch's value; if it holds records `along` a dim, that dim covers all microbatches."""
        if shape is None:
            return None
        times = [self.count if dim == along else 1 for dim in range(len(shape))]
        return tuple(
            dim * each if isinstance(dim, int) else self._dim(dim, each) for dim, each in zip(shape, times, strict=True)
        )

    def text(self, expression: str) -> str:
        """Converts an expression of a microbatch, such as bytes."""
        return str(self._dim(expression, 1))

    def normal(self, shape: Shape | None) -> tuple[str, ...]:
        """The dims of a shape of the whole batch in normal form."""
        found = [(dim, read(str(dim))) for dim in shape or ()]
        return tuple(str(dim if one is None else normal(one, self._known)) for dim, one in found)

    def _dim(self, text: str, times: int) -> int | str:
        if (text, times) not in self._made:  # every row and body asks for the dims of all its values
            self._made[text, times] = self._found(text, times)
        return self._made[text, times]

    def _found(self, text: str, times: int) -> int | str:
        expression = read(text)
        if expression is None or (not self._shares and times == 1):
            return text
        found = normal(times * expression.subs(self._shares, simultaneous=True), self._known)
        return int(found) if found.is_Integer else str(found)
