"""What steps that make tokens cost and send, each against a goal: slots, a long prompt, weights of four bits, bytes over two ranks.

    python tests/benchmarks/generate_steps.py [--only slots,gap,bits,bytes,drafts] [--turns 5] [--files FOLDER]

A Llama of 4 layers of width 512 with random weights, exported once by torch into `--files`; ranks are threads of this process, with one
thread each. Times are of this process's CPU, in turns.

    slots   16 requests of 3 to 150 tokens that make 10 to 50: with 8 slots, and one after the other in one
    gap     a prompt of 2,000 tokens arrives while 7 slots make tokens: the longest time between two tokens of theirs, in steps
    bits    MatMulNBits of blocks of 32 over two ranks: the tokens of one rank, and how much of the weights a rank has
    bytes   what a step over two ranks sends: two AllReduce a layer, and 16 bytes a slot for the next token
    drafts  one sequence with drafts of 4 and without, in float32 and in four bits: an answer that repeats itself, and a drawn one that
            does not
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from exported_decoders import exported
from generate import SIZE, built
from partc.compiler import compile_model
from partc.compiler.pipeline import analyse
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.generation import Generation
from partc.runtime import Generator, Request, load_local_generator
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.generation.slots import Slots

MORE = "sampling: false, chunk: 64"
TENSOR = """ranks: 2
mesh: {tp: 2}
sharding:
  "model.model.layers.*.self_attn.[qkv]_proj": colwise
  "model.model.layers.*.self_attn.o_proj": rowwise
  "model.model.layers.*.mlp.gate_proj": colwise
  "model.model.layers.*.mlp.up_proj": colwise
  "model.model.layers.*.mlp.down_proj": rowwise
  model.lm_head: colwise
"""
"""The plan of Megatron-LM, in which each rank has the whole embedding."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc-decoders")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - ROWS.keys():
        parser.error(f"--only: no row is called {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    path = exported("llama", 23, "plain", options.files, **SIZE)
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as place:
            print(ROWS[name](path, Path(place), options.turns), flush=True)


def steps(generator: Generator, requests: list[Request]) -> tuple[list[tuple[bool, float, list[int]]], list[list[int]]]:
    """By step whether it reads a prompt, its CPU seconds, and whose tokens it makes; and by request its tokens."""
    slots, found, made = Slots(generator.record), [], [list[int]() for _ in requests]
    for number, request in enumerate(requests):
        slots.admit(number, request)
    while (step := slots.next()) is not None:
        begin = time.process_time()
        tokens = generator.begin(slots, step)()
        found.append((step.slots is not None, time.process_time() - begin, [one.request for one in tokens]))
        for one in tokens:
            made[one.request].append(one.token)
    return found, made


def of_slots(path: Path, place: Path, turns: int) -> str:
    rng = np.random.default_rng(0)
    sizes = zip(rng.integers(3, 151, 16).tolist(), rng.integers(10, 51, 16).tolist(), strict=True)
    requests = [Request(rng.integers(2, 4096, size).tolist(), max_tokens=count) for size, count in sizes]
    total = sum(one.max_tokens for one in requests)
    took: dict[int, list[tuple[float, float]]] = {8: [], 1: []}
    counts, answers = {}, {}
    builds = {slots: built(path, place / str(slots), Degrees(), Generation(256, slots), MORE)[0] for slots in took}
    with load_local_generator(builds[8], threads=1) as several, load_local_generator(builds[1], threads=1) as one:
        for _ in range(turns):
            for slots, generator in ((8, several), (1, one)):
                found, answers[slots] = steps(generator, requests)
                decoding = [seconds for reads, seconds, _ in found if not reads]
                took[slots].append((sum(seconds for _, seconds, _ in found), sum(decoding)))
                counts[slots] = len(decoding)
    whole, decode = ([statistics.median(column) for column in zip(*(took[8], took[1])[k], strict=True)] for k in (0, 1))
    rows = []
    for name, k, goal in (("with prompts", 0, 2), ("steps that decode alone", 1, 3)):
        ratio = decode[k] / whole[k]
        rows.append(
            f"slots: {total} tokens {name}: 8 slots {1e3 * whole[k] / total:.2f} ms CPU a token, one after the other "
            f"{1e3 * decode[k] / total:.2f}: {ratio:.2f} times the tokens/s, {verdict(ratio >= goal, f'at least {goal}')}"
        )
    same = "the same tokens" if answers[8] == answers[1] else "NOT THE SAME TOKENS"
    return "\n".join([*rows, f"slots: {counts[8]} steps that decode for {counts[1]}; {same}"])


def of_gap(path: Path, place: Path, turns: int) -> str:
    rng = np.random.default_rng(0)
    short = [Request(rng.integers(2, 4096, 8).tolist(), max_tokens=100) for _ in range(7)]
    requests = [*short, Request(rng.integers(2, 4096, 2000).tolist(), max_tokens=4)]
    worst, in_steps, chunks, decodes = [], 0, [], []
    with load_local_generator(
        built(path, place / "gap", Degrees(), Generation(2100, 8), MORE)[0], threads=1
    ) as generator:
        for _ in range(turns):
            found, _ = steps(generator, requests)
            chunks += [seconds for reads, seconds, _ in found if reads][len(short) :]
            decodes += [seconds for reads, seconds, _ in found if not reads]
            last: dict[int, int] = {}
            gaps = []
            for at, (_, _, made) in enumerate(found):
                for one in made:
                    if one < len(short):
                        if one in last and len(last) == len(short):
                            gaps.append(
                                (sum(seconds for _, seconds, _ in found[last[one] + 1 : at + 1]), at - last[one])
                            )
                        last[one] = at
            worst.append(max(gap for gap, _ in gaps))
            in_steps = max(in_steps, *(count for _, count in gaps))
    gap, chunk, decode = statistics.median(worst), max(chunks), statistics.median(decodes)
    most = chunk + 2 * decode
    return (
        f"gap: the longest between two tokens of a slot {1e3 * gap:.1f} ms CPU, {in_steps} steps; the slowest chunk {1e3 * chunk:.1f}, "
        f"a step {1e3 * decode:.1f}: {verdict(gap <= most and in_steps <= 3, f'at most {1e3 * most:.1f}')}"
    )


def of_bits(path: Path, place: Path, turns: int) -> str:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
    quantizer = MatMulNBitsQuantizer(onnx.load(path), block_size=32, is_symmetric=True)
    quantizer.process()
    onnx.save(quantizer.model.model, place / "model.onnx")
    rng = np.random.default_rng(0)
    requests = [Request(rng.integers(2, 4096, size).tolist(), max_tokens=50) for size in (3, 40, 17)]
    answers, weights = [], []
    for ranks in (1, 2):
        build, _ = built(place / "model.onnx", place / str(ranks), Degrees(tp=ranks), Generation(128, 2), MORE)
        with load_local_generator(build, threads=1) as generator:
            answers.append([one.tokens for one in generator.run(requests)])
        graph = open_artifact(build).model(0).graph
        weights.append(
            sum(
                np.prod(one.dims) * onnx.helper.tensor_dtype_to_np_dtype(one.data_type).itemsize
                for one in graph.initializer
            )
        )
        kinds = sum(node.op_type == "MatMulNBits" for node in graph.node)
    share = weights[1] / weights[0]
    return (
        f"bits: {kinds} MatMulNBits, tp 2: tokens {'equal' if answers[0] == answers[1] else 'NOT EQUAL TO'} those of one rank; a rank "
        f"has {share:.3f} of the weights, {verdict(share <= 0.55 and answers[0] == answers[1], 'at most 0.55')}"
    )


def of_bytes(path: Path, place: Path, turns: int) -> str:
    slots, layers, width = 4, SIZE["layers"], SIZE["width"]
    plan = place / "plan.yaml"
    plan.write_text(f"{TENSOR}generate: {{slots: {slots}, length: 256, {MORE}}}\n")
    compile_model(path, plan, place / "build")
    events = analyse(path, plan).events
    kinds = [event.op_type for event in events]
    sent = sum(int(str(event.bytes)) for event in events)
    wanted = 2 * layers * slots * width * 4 + 16 * slots
    text = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return f"bytes: a step of {slots} slots over 2 ranks: {text}, {sent} bytes to a rank, {verdict(sent <= wanted, f'at most {wanted}')}"


def of_drafts(path: Path, place: Path, turns: int) -> str:
    rng, rows = np.random.default_rng(0), []
    prompt = rng.integers(2, 4096, 32).tolist()
    requests = {
        "one that repeats": Request(
            prompt, max_tokens=200, logit_bias=dict.fromkeys((7, 70, 700), 50.0)
        ),  # one of three tokens
        "one that does not": Request(prompt, max_tokens=200, temperature=2.0, seed=3),
    }
    for kind, section in (("float32", ""), ("four bits", 'quantize: {"**": {bits: 4, block: 32}}\n')):
        builds = {}
        for name, more in (("drafts", "draft: {tokens: 4}, "), ("without", "")):
            folder = place / f"{kind} {name}"
            folder.mkdir()
            (folder / "plan.yaml").write_text(
                f"ranks: 1\n{section}generate: {{{more}slots: 1, length: 256, chunk: 64}}\n"
            )
            compile_model(path, folder / "plan.yaml", folder / "build")
            builds[name] = folder / "build"
        with (
            load_local_generator(builds["drafts"], threads=1) as drafts,
            load_local_generator(builds["without"], threads=1) as without,
        ):
            for name, request in requests.items():
                took: tuple[list[float], list[float]] = [], []
                answers = []
                for _ in range(turns):
                    for times, generator in zip(took, (drafts, without), strict=True):
                        found, made = steps(generator, [request])
                        answers.append(made)
                        times.append(sum(seconds for _, seconds, _ in found) / 200)
                        if generator is drafts:
                            count = len(found)
                ratio = statistics.median(took[1]) / statistics.median(took[0])
                same = f"{sum(one == answers[0] for one in answers)} of {len(answers)} answers are the same"
                rows.append(
                    f"drafts: {kind}, {name}: {count} steps for 200 tokens, {1e3 * statistics.median(took[0]):.2f} ms CPU a token, "
                    f"without {1e3 * statistics.median(took[1]):.2f}: {ratio:.2f} times the tokens/s; {same}"
                )
    return "\n".join(rows)


def verdict(met: bool, goal: str) -> str:
    return f"{goal} wanted: {'met' if met else 'missed'}"


ROWS: dict[str, Callable[[Path, Path, int], str]] = {
    "slots": of_slots,
    "gap": of_gap,
    "bits": of_bits,
    "bytes": of_bytes,
    "drafts": of_drafts,
}


if __name__ == "__main__":
    main()
