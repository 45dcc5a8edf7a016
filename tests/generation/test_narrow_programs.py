"""A step computes as few rows as have a sequence, and a request's tokens and logits are the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import Unsharded, decoder
from partc.compiler.pipeline import compile_model
from partc.runtime import Generator, Request, load_local_generator
from partc.runtime.artifact.generation import Blocks, GenerationRecord
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.checker.check import check
from partc.runtime.generation import row_bits
from partc.runtime.generation.slots import Slots, Step

TENSOR = """ranks: 2
mesh: {tp: 2}
sharding: {"layers.*.{q,k,v,up}": colwise, "layers.*.{o,down}": rowwise, head: colwise}
"""
QUANTIZED = 'quantize: {"**": {block: 16}}\n'
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [60, 2, 33, 4], [5] * 20, [9, 9]]


@pytest.fixture(scope="module", params=["float", "quantized"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("narrow")
    onnx.save(decoder(fused=True), root / "model.onnx")
    more, cache = (QUANTIZED, "cache: int8, ") if request.param == "quantized" else ("", "")
    (root / "plan.yaml").write_text(f"{TENSOR}{more}generate: {{{cache}slots: 5, length: 64, chunk: 16}}\n")
    compile_model(root / "model.onnx", root / "plan.yaml", root / "build")
    return root / "build"


class _Watched(Slots):
    """Slots that note the programs of their steps."""

    programs: list[str]

    def next(self, group: int = 0) -> Step | None:
        step = super().next(group)
        if step is not None:
            self.programs.append(step.program)
        return step


def _bits(generator: Generator, requests: list[Request]) -> tuple[dict[int, list[bytes]], set[str]]:
    """By request the logits of each of its steps that makes a token, as bytes, and the programs that ran."""
    slots, found = _Watched(generator.record, generator.least_rows), dict[int, list[bytes]]()
    slots.programs = []
    for number, request in enumerate(requests):
        slots.admit(number, request)
    while (step := slots.next()) is not None:
        outputs = generator._outputs(step)
        shards = [np.asarray(one[generator.record.logits]) for _, one in sorted(outputs.items())]
        chosen: Array = next(iter(outputs.values()))[generator.record.next]  # type: ignore[assignment]
        for row, (_, count, one) in step.taking.items():
            if count >= one.unread:
                found.setdefault(one.number, []).append(b"".join(shard[row].tobytes() for shard in shards))
        slots.take(step, chosen.tolist())
    return found, set(slots.programs)


def test_logits_have_the_same_bits_in_any_company(folder: Path) -> None:
    requests = [Request(prompt, max_tokens=16) for prompt in PROMPTS]
    with load_local_generator(folder) as generator:
        together, programs = _bits(generator, requests)
        assert {"decode", "prefill", "prefill_4"} <= programs
        for number, request in enumerate(requests):
            alone, programs = _bits(generator, [request])
            assert alone[0] == together[number]
            assert programs <= {"prefill", "prefill_4", f"decode_{generator.least_rows}"}
        pair, programs = _bits(generator, requests[1:3])
        assert pair == {0: together[1], 1: together[2]}
        assert "decode_2" in programs


def test_tokens_are_those_of_the_model_and_the_checker_has_no_objection(folder: Path) -> None:
    assert check(folder).violations == []
    record = open_artifact(folder).manifest.generation
    assert record is not None
    assert (record.narrow_chunks, record.narrow_rows) == ([4], [1, 2, 4])
    if record.products:
        assert record.products == [Blocks(bits=4, block=16, level=4)]
        return
    alone = Unsharded(decoder(fused=True))
    with load_local_generator(folder) as generator:
        for count in (1, 2, 3, 5):
            answers = generator.run([Request(prompt, max_tokens=8) for prompt in PROMPTS[:count]])
            assert [one.tokens for one in answers] == [alone.tokens(prompt, 8) for prompt in PROMPTS[:count]]


def _decodes(slots: Slots, making: dict[int, int]) -> tuple[str, list[int] | None]:
    step = slots._decode({slot: slots._running[slot] for slot in making}, 0)  # type: ignore[misc]
    return step.program, None if step.slots is None else [*step.slots]


@pytest.fixture
def record() -> Iterator[GenerationRecord]:
    """Two runs of four slots."""
    ports = {"tokens": "ids", "position": "position", "count": "count", "next": "next"}
    return GenerationRecord(**ports, vocabulary=9, slots=8, length=16, chunk=4, runs=2, narrow_rows=[1, 2])  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("used", "least", "program", "window"),
    [
        ([0], 1, "decode_1", [0, 4]),
        ([6], 1, "decode_1", [0, 6]),
        ([0, 6], 1, "decode_1", [0, 6]),
        ([0], 2, "decode_2", [0, 1, 4, 5]),
        ([3], 2, "decode_2", [2, 3, 4, 5]),
        ([1, 2, 7], 1, "decode_2", [1, 2, 6, 7]),
        ([0, 2], 1, "decode", None),
    ],
)
def test_a_window_has_the_slots_in_use(
    record: GenerationRecord, used: list[int], least: int, program: str, window: list[int] | None
) -> None:
    slots = Slots(record, least)
    for number in range(8):
        slots.admit(number, Request([1], max_tokens=3))
    assert (first := slots.next()) is not None
    assert first.program == "prefill"
    for one in slots._running:
        assert one is not None
        one.tokens, one.position = [1], 1
    for slot in set(range(8)) - {*used}:
        slots._running[slot] = None
    assert _decodes(slots, dict.fromkeys(used, 0)) == (program, window)


def test_a_machine_where_one_row_has_other_bits_gets_two(
    monkeypatch: pytest.MonkeyPatch, record: GenerationRecord
) -> None:
    assert row_bits.least_rows(record) == 1
    quantized = record.model_copy(update={"products": [Blocks(bits=4, block=32, level=1)]})
    monkeypatch.setattr(row_bits, "keeps_bits", lambda *kind: False)
    assert row_bits.least_rows(quantized) == 2
