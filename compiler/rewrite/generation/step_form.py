"""The two forms of a decoder's step: one token of every slot of a group, and a chunk of a prompt of one slot.

    decode     tokens [slots, 1]      position [slots]   count [slots]        slots of one group, where several groups take turns
    prefill    tokens [runs, chunk]   position [runs]    count [runs]

    draft      tokens [runs, n]       position [runs]    count [runs]        a prefill that scores all its tokens, in a plan with `draft`

Before an encoder's sequence begins, `encode` computes the encoder of one slot of each run (`encoder.py`).

Each form has narrow variants: a prefill of fewer tokens for the end of a prompt, and a decode of fewer consecutive slots, where no
other slot has a sequence. Each variant has its own program, so that a step computes no more rows than it needs, up to the next size.

    prefill_4     tokens [runs, 4]        prefill_16, ..
    decode_2      tokens [2 runs, 1]      decode_1, decode_4, ..

All are the same graph in other sizes, as far as the plan's shardings allow, so that ranks can run them with the same sessions.

Where slots are sharded over ranks (data parallel), they lie in `runs` of equal size, and a prefill takes one slot of each run: every rank
computes one of its own slots. A rank binds only that slot's row of each cache, as a cache with one slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.program import Loaded, Lowered
from partc.compiler.ir.training import ProgramKind
from partc.compiler.plan.generate import GenerateRules

_LEAST_CHUNK = 4


@dataclass(frozen=True)
class StepForm:
    """The slots (`rows`) of a step and the most tokens of each slot; `runs`: the number of runs of slots, 1 before it is known.

    `scored`: how many tokens of each slot are scored.
    """

    rules: GenerateRules
    rows: int
    tokens: int
    runs: int
    scored: int = 1

    @classmethod
    def of(cls, program: Loaded, rules: GenerateRules) -> StepForm:
        """Returns the form of one of a plan's programs. Raises CompileError where caches have different numbers of runs of slots."""
        if program.kind is ProgramKind.STEP:
            return cls(rules, rules.rows, 1, 1)
        runs = _runs(program.other_programs[ProgramKind.STEP], rules)
        if program.kind is ProgramKind.DECODE_ROWS:
            return cls(rules, program.size * runs, 1, runs)
        tokens = program.size or rules.chunk
        return cls(rules, runs, tokens, runs, tokens if program.kind is ProgramKind.DRAFT else 1)


def narrow_chunks(rules: GenerateRules) -> list[int]:
    """Returns the tokens of narrow prefills: the chunk divided by 4, 16, .. (rounded up), down to 4, in ascending order."""
    found, size = list[int](), rules.chunk
    while (size := -(-size // 4)) >= _LEAST_CHUNK:
        found.append(size)
    return found[::-1]


def narrow_rows(rules: GenerateRules, runs: int) -> list[int]:
    """Returns the numbers of slots of a run in narrow decodes: the powers of two below the run's size; none with drafts."""
    if rules.draft is not None:
        return []
    of_run = rules.rows // runs
    return [1 << k for k in range(of_run.bit_length()) if 1 << k < of_run]


def _runs(decode: Lowered, rules: GenerateRules) -> int:
    """Returns the number of runs into which the slots of the caches are sharded."""
    counts = {
        one.version.layout.shards[0]: one.tensor
        for part, _ in decode.distinct_programs
        for one in part.state
        if one.kind == "cache"
    }
    if len(counts) > 1:
        (one, first), (two, second), *_ = sorted(counts.items())
        fact = f"the slots of '{first}' lie in {one} runs, and those of '{second}' in {two}"
        help_ = "shard the batch of all layers alike, or leave it whole"
        raise CompileError(Problem(rules.where("slots"), fact, "a prompt is read where its slot lies", help_))
    return next(iter(counts), 1)
