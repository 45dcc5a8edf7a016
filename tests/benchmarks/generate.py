"""Decoders of transformers generate with partc, in several layouts, as transformers itself does; and what a token costs.

    python tests/benchmarks/generate.py [--models llama,gpt2] [--opsets 18,23] [--forms plain,both,folder] [--files FOLDER]
    python tests/benchmarks/generate.py --slots 8 [--lengths 2048] [--turns 5]
    python tests/benchmarks/generate.py --capacities 512,16384 [--lengths 256] [--turns 5]

A row for each model and layout: how many tokens of several requests, of unequal lengths and made at once, are those of transformers' greedy
`generate`; how many ties there were (the two best logits closer than 1e-4, after which the reference's token is taken); and the bytes that
a step of one token sends, the sum over its events of the bytes to a rank. Plans are those that `partc plan --generate` proposes.

`--slots` prints medians of CPU milliseconds a token of several sequences at once, by the number of tokens before it, beside the form in
which attention is not fused, and beside onnxruntime with one sequence after the other; sides have one thread. `--capacities` prints
milliseconds of a step by the `length` of the plan, which it is not to grow with: the largest within 10 % of the smallest is wanted. Files
are exported once and stay in the folder.

What a token costs beside other runtimes is in `generate_peers.py`, what steps cost and send in `generate_steps.py`, tokens a second over
ranks in `generate_ranks.py`, the server in `server.py`, and the memory of a rank in `predicted_memory.py gpt-generate`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers
from click.testing import CliRunner
from exported_decoders import FOLDER, MODELS, VOCABULARY, WITH_ENCODER, exported, model
from partc.cli.commands.check import command as invoke_check
from partc.compiler import compile_model
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.pipeline import analyse
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.generation import Generation
from partc.compiler.proposal.propose import propose
from partc.compiler.rewrite.generation import caches
from partc.runtime import Generator, Request, load_local_generator

LAYOUTS = {
    "1 rank": (Degrees(), 1),
    "1 rank, 4 slots": (Degrees(), 4),
    "tp 2": (Degrees(tp=2), 4),
    "2 stages": (Degrees(stages=2), 4),
    "dp 2": (Degrees(dp=2), 4),
    "tp 2, 2 stages": (Degrees(tp=2, stages=2), 4),
}
PROMPTS, COUNT, CLOSE = (3, 17, 40, 9, 1, 26), 200, 1e-4
LENGTH, CHUNK = 256, 16


def main() -> None:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join((*MODELS, *WITH_ENCODER)))
    parser.add_argument("--opsets", default="23")
    parser.add_argument("--forms", default="plain")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc-decoders")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--capacities")
    parser.add_argument("--lengths", default="64,2048")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    lengths = [int(one) for one in options.lengths.split(",")]
    if options.slots:
        costs_of_slots(options.files, options.slots, lengths, options.turns)
        return
    if options.capacities:
        costs_by_capacity(options.files, [int(one) for one in options.capacities.split(",")], lengths, options.turns)
        return
    print(f"{'model':8} {'opset':5} {'form':5} {'layout':16} {'equal':>9} {'ties':>5}  bytes of a step")
    for name in options.models.split(","):
        wanted = reference(name)
        for opset in map(int, options.opsets.split(",")):
            for form in options.forms.split(",") if name not in WITH_ENCODER else (FOLDER,):
                path = exported(name, opset, form, options.files)
                for layout in LAYOUTS:
                    row = f"{name:8} {opset:<5} {form:5} {layout:16}"
                    print(row, told(path, layout, wanted), flush=True)


Reference = list[tuple[Request, list[int], list[float]]]
"""By request the tokens behind its prompt, and by how much the best logit of each is above the second."""


def reference(name: str) -> Reference:
    """What transformers makes, a request at a time."""
    whole, rng, found = model(name), np.random.default_rng(0), []
    for size in PROMPTS:
        given: Any = rng.integers(2, VOCABULARY, size).tolist()
        prompt = given if name not in WITH_ENCODER else [whole.config.decoder_start_token_id]
        if name == "whisper":  # its prompt has several tokens; its features are of one size
            prompt = [*prompt, *given[: size % 4]]
            given = rng.standard_normal((whole.config.num_mel_bins, 2 * whole.config.max_source_positions), np.float32)
        options = {} if name not in WITH_ENCODER else {"decoder_input_ids": torch.tensor([prompt])}
        with torch.no_grad():
            made = transformers.GenerationMixin.generate(
                whole, torch.tensor(np.array([given])), max_new_tokens=COUNT, do_sample=False, return_dict_in_generate=True,
                output_logits=True, **options,
            )  # fmt: skip
        best = [logits[0].topk(2).values for logits in made.logits]
        request = Request(prompt, max_tokens=COUNT, encoder=given if name in WITH_ENCODER else None)
        found.append((request, made.sequences[0, len(prompt) :].tolist(), [float(one[0] - one[1]) for one in best]))
    return found


def told(path: Path, layout: str, wanted: Reference) -> str:
    """The end of a row."""
    degrees, slots = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            build, sent = built(path, folder, degrees, Generation(LENGTH, slots), f"chunk: {CHUNK}")
            checked = CliRunner().invoke(invoke_check, [str(build)])
            with load_local_generator(build, threads=1) as generator:
                equal, ties, wrong = compared(generator, wanted)
        except (CompileError, RuntimeError) as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
    fault = "" if checked.exit_code == 0 else f"; partc check ends with {checked.exit_code}"
    return f"{equal:4} / {equal + wrong:<4} {ties:3}  {sent}{fault}"


def built(path: Path, folder: Path, degrees: Degrees, generation: Generation, more: str) -> tuple[Path, str]:
    """The artifact by the plan that is proposed, and what the proposal says that a step sends."""
    folder.mkdir(exist_ok=True)
    text, _ = propose(load(path), path.name, degrees, generation=generation)
    (folder / "plan.yaml").write_text(text.replace("generate: {", f"generate: {{{more}, "))
    compile_model(path, folder / "plan.yaml", folder / "build")
    events = analyse(path, folder / "plan.yaml").events
    sent = sum(int(str(event.bytes)) for event in events)
    return (
        folder / "build",
        f"{sent:5}, {next(line for line in text.splitlines() if 'Communication in a step' in line)[26:-1]}",
    )


def compared(generator: Generator, wanted: Reference) -> tuple[int, int, int]:
    """How many tokens are equal, how many were ties, and how many are wrong; behind a tie a request goes on from the reference."""
    equal = ties = wrong = 0
    left = [(one, 0) for one in wanted]
    while left:
        requests = [
            replace(request, prompt=[*request.prompt, *tokens[:at]], max_tokens=COUNT - at)
            for (request, tokens, _), at in left
        ]
        following = []
        for ((request, tokens, gaps), at), answer in zip(left, generator.run(requests), strict=True):
            there = next((k for k, one in enumerate(answer.tokens) if one != tokens[at + k]), None)
            if there is None:
                equal += len(answer.tokens)
                continue
            equal += there
            if gaps[at + there] >= CLOSE:
                wrong += COUNT - at - there
                continue
            ties += 1
            if at + there + 1 < COUNT:
                following.append(((request, tokens, gaps), at + there + 1))
        left = following
    return equal, ties, wrong


SIZE = {"layers": 4, "width": 512, "heads": 8, "vocabulary": 4096}


def prompts_of(count: int, length: int) -> list[list[int]]:
    """Random prompts of a length."""
    return [np.random.default_rng(seed).integers(2, 4096, length).tolist() for seed in range(count)]


def costs_of_slots(files: Path, slots: int, lengths: Sequence[int], turns: int) -> None:
    """What a token costs where several sequences are made at once."""
    path = exported("llama", 23, "plain", files, **SIZE)
    generation = Generation(max(lengths) + 128, slots)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        generators = {}
        for form in ("fused", "not fused"):
            with unittest.mock.patch.object(
                caches, "fuse_attention", caches.fuse_attention if form == "fused" else leave
            ):
                build, _ = built(path, Path(place) / form, Degrees(), generation, "sampling: false, chunk: 512")
            generators[form] = stack.enter_context(load_local_generator(build, threads=1))
        for length in lengths:
            prompts = prompts_of(slots, length)
            steps = {form: by_slots(generator, prompts) for form, generator in generators.items()}
            took = {form: measured(step, turns) for form, step in steps.items()}
            alone = [
                by_file(path, prompt) for prompt in prompts[:2]
            ]  # a session each, of which one after the other makes tokens
            for one in alone:
                next(one)
            took["onnxruntime, one after the other"] = [slots * cost for one in alone for cost in measured(one, turns)]
            row = ", ".join(f"{form} {statistics.median(times) / slots:.2f}" for form, times in took.items())
            print(f"{slots} slots, {length} tokens before: CPU ms a token: {row}", flush=True)


def leave(*given: object) -> tuple[()]:
    """In place of the rewrite to the fused op: no node is named that it leaves."""
    return ()


def costs_by_capacity(files: Path, capacities: Sequence[int], lengths: Sequence[int], turns: int) -> None:
    """What a step costs by the length of the caches, of which as many entries are valid."""
    path = exported("llama", 23, "plain", files, **SIZE)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        steps = {}
        for capacity in capacities:
            build, _ = built(
                path, Path(place) / str(capacity), Degrees(), Generation(capacity, 4), "sampling: false, chunk: 256"
            )
            generator = stack.enter_context(load_local_generator(build, threads=1))
            steps[capacity] = by_slots(generator, prompts_of(4, lengths[0]))
        took: dict[int, list[float]] = {capacity: [] for capacity in capacities}
        for _ in range(4 * turns):  # in turns, as the machine has others
            for capacity, step in steps.items():
                took[capacity] += measured(step, 1)
        medians = {capacity: statistics.median(times) for capacity, times in took.items()}
        row = ", ".join(f"{capacity}: {median:.2f}" for capacity, median in medians.items())
        ratio = medians[max(medians)] / medians[min(medians)]
        text = f"{row}; ratio {ratio:.3f}, at most 1.10 wanted: {'met' if ratio <= 1.1 else 'missed'}"
        print(f"4 slots, {lengths[0]} tokens before: CPU ms a step by length of the caches: {text}", flush=True)


def by_slots(generator: Generator, prompts: Sequence[list[int]]) -> Iterator[None]:
    """Steps that make one token of each prompt; all prompts are read before the first."""
    begun, made = set[int](), 0
    for one in generator.each([Request(prompt, max_tokens=128) for prompt in prompts]):
        made += one.request in begun and len(begun) == len(prompts)
        begun.add(one.request)
        if made and made % len(prompts) == 0:
            yield


def measured(steps: Iterator[object], turns: int) -> list[float]:
    """CPU milliseconds of steps, but for the first."""
    took = []
    for turn in range(1 + 3 * turns):
        begin = time.process_time()
        next(steps)
        took += [1e3 * (time.process_time() - begin)] * (turn > 0)
    return took


def by_file(path: Path, prompt: list[int]) -> Iterator[int]:
    """Tokens of one session, with a past that grows."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ports = [port for port in session.get_inputs() if port.name.startswith("past")]
    past = {port.name: np.zeros((1, port.shape[1], 0, port.shape[3]), np.float32) for port in ports}
    given = prompt
    while True:
        logits, *present = session.run(None, {"input_ids": np.array([given]), **past})
        past = dict(zip(past, present, strict=True))
        given = [int(logits[0, -1].argmax())]
        yield given[0]


if __name__ == "__main__":
    main()
