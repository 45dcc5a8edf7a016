"""Random decoders on random ranks, and random requests at once, against the unsharded model and one prompt after the other.

    python tests/fuzz/random_generation.py --cases 200 --seed 1
    python tests/fuzz/random_generation.py --case 17              one of them again, with its plan

Drawn are the form of the decoder (how it counts positions, its attention, a window, its mask), the layout (tensor parallel in any subset
of its linears, also of more ranks than heads of keys; stages; data parallel; several of these, as a mesh or as lists of ranks), slots and
their groups, chunk and length, and prompts from one token to as many as fit. Some cases draw their tokens, as one rank does, and some have
drafts, which change no token.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import onnx

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from decoders import CAUSAL_FORMS, OTHER_MASKS, VOCABULARY, Unsharded, decoder, with_mask
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime import Request, load_local_generator
from partc.runtime.checker.check import check
from random_pipelines import reason

PARTS = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise", "up": "colwise", "down": "rowwise"}


class Case:
    """A decoder, a plan and requests."""

    def __init__(self, number: int) -> None:
        random = self.random = Random(number)
        self.form = {
            "layers": random.choice((1, 2, 3)),
            "inputs": tuple(name for name in ("position_ids", "attention_mask") if random.random() < 0.3),
            "fused": random.random() < 0.5,
            "window": random.choice((0, 0, 0, 3, 17)),
            "single": random.random() < 0.2,
            "flat": random.random() < 0.15,
            "rows": random.random() < 0.85,
        }
        self.mask = random.choice(CAUSAL_FORMS + OTHER_MASKS) if random.random() < 0.5 else ""
        self.length = random.randint(8, 90)
        self.slots = random.choice((1, 1, 2, 4, 6))
        self.chunk = random.randint(1, min(20, self.length))
        self.draws = random.random() < 0.3
        layout = self._layout()
        groups = random.choice((1, 1, 2)) if self.slots % 2 == 0 else 1
        taken = f", groups: {groups}" if groups > 1 else ""
        taken += "" if self.draws or random.random() < 0.5 else ", sampling: false"
        drafts = Random(f"drafts {number}")
        if self.form["fused"] and self.chunk > 1 and drafts.random() < 0.5:
            taken += f", draft: {{tokens: {drafts.randint(1, self.chunk - 1)}, lookup: {drafts.randint(1, 3)}}}"
        said = f"length: {self.length}, chunk: {self.chunk}}}\n"
        self.plan = f"{layout}generate: {{slots: {self.slots}{taken}, {said}"
        self.alone = f"ranks: 1\ngenerate: {{slots: 1, {said}"
        self.requests = [self._request() for _ in range(random.randint(1, 7))]

    def _layout(self) -> str:
        random, layers = self.random, int(str(self.form["layers"]))
        tensor, stages = random.choice((1, 2, 2, 2, 4, 4, 8)), random.choice((1, 1, 2)) if layers > 1 else 1
        if tensor == stages == 1 and self.slots % 2 == 0 and random.random() < 0.5:
            return "ranks: 2\ndataset: data_parallel\n"
        replicas = 2 if stages == 1 and tensor < 4 and self.slots % 2 == 0 and random.random() < 0.3 else 1
        listed = replicas == 1 and random.random() < 0.3
        lines = [f"ranks: {replicas * tensor * stages}"]
        if replicas > 1:
            names = ("ids", *self.form["inputs"])  # type: ignore[misc]
            cut = ", ".join(f"{name}: [dp, null]" for name in names)
            lines += [f"mesh: {{dp: 2, tp: {tensor}}}", f"dataset: {{{cut}}}"]
        elif not listed:
            lines.append(f"mesh: {{pp: {stages}, tp: {tensor}}}")
        at = [str([*range(k * tensor, (k + 1) * tensor)]) if listed else f"{{pp: {k}}}" for k in range(stages)]
        if tensor > 1:
            names = [name for name in PARTS if random.random() < 0.8]
            lines += ["sharding:"] * bool(names) + [f'  "layers.*.{name}": {PARTS[name]}' for name in names]
            lines += ["  head: colwise"] * (bool(names) and random.random() < 0.6)
        if stages > 1:
            border = random.randint(1, layers - 1)
            lines += ["placement:", f'  "embed.*": {at[0]}', f"  head: {at[1]}"]
            lines += [f'  "layers.{layer}": {at[int(layer >= border)]}' for layer in range(layers)]
        return "\n".join(lines) + "\n"

    def _request(self) -> Request:
        random = self.random
        size = random.randint(1, self.length - 1)
        count = random.randint(1, min(self.length - size, 24))
        stop = tuple(random.sample(range(VOCABULARY), 2)) if random.random() < 0.3 else ()
        drawn = {"temperature": random.choice((0.5, 1.0)), "seed": random.randrange(99)} if self.draws else {}
        prompt = [random.randrange(VOCABULARY) for _ in range(size)]
        return Request(prompt, max_tokens=count, stop=stop, **drawn)  # type: ignore[arg-type]

    def result(self) -> str:
        """Empty where it is equal; "refused", or what is wrong."""
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            model = with_mask(decoder(**self.form), self.mask)  # type: ignore[arg-type]
            onnx.save(model, folder / "model.onnx")
            (folder / "plan.yaml").write_text(self.plan)
            try:
                compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
            except CompileError as error:
                return f"refused: {str(error).splitlines()[0]}"
            if found := check(folder / "build").violations:
                return f"a violation: {found[0]}"
            if self.draws:
                (folder / "alone.yaml").write_text(self.alone)
                compile_model(folder / "model.onnx", folder / "alone.yaml", folder / "alone")
                with load_local_generator(folder / "alone") as generator:
                    wanted = [generator.run([one])[0].tokens for one in self.requests]
            else:
                alone = Unsharded(model)
                wanted = [alone.tokens(one.prompt, one.max_tokens, one.stop) for one in self.requests]
            with load_local_generator(folder / "build") as generator:
                answers = generator.run(self.requests)
            return (
                ""
                if [one.tokens for one in answers] == wanted
                else f"other tokens: {[one.tokens for one in answers]}, not {wanted}"
            )


def main() -> int:
    """Runs the cases; 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wrong = refused = 0
    reasons: Counter[str] = Counter()
    for number in [args.case] if args.case is not None else range(args.seed * 10_000, args.seed * 10_000 + args.cases):
        case = Case(number)
        try:
            text = case.result()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        refused += text.startswith("refused")
        if text.startswith("refused"):
            reasons[reason(text)] += 1
        if text and (not text.startswith("refused") or args.case is not None):
            wrong += not text.startswith("refused")
            print(f"case {number}: {text}\n{case.form}, {case.mask}\n{case.plan}", flush=True)
    for one, number in reasons.most_common():
        print(f"refused {number}: {one}")
    count = 1 if args.case is not None else args.cases
    print(f"{count} cases: {count - wrong - refused} equal, {refused} refused, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
