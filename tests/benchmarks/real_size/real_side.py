"""A side of `real_generation.py`: loads a model, then measures itself by numbers of `MEASURES`, in CPU seconds of its process.

    python real_side.py partc|transformers|llama|genai MODEL

Sides have one thread and room for 8 sequences of 1,024 tokens. Prompts are new in each measure, so that no prefix is known. The first
answer is the load: CPU seconds to the first token of a prompt of 4, without imports, less those of such a prompt later on.
"""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from turns import answer, told

SLOTS, LENGTH, TOKENS, COMPARED, WARM = 8, 1024, 32, 100, 256
Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]
"""Makes so many tokens after each of the prompts, which have one length."""

MEASURES = {
    "prompt of 4": (1, 4),
    "prompt of 64": (1, 64),
    "prompt of 512": (1, 512),
    "one sequence": (1, 4),
    "8 sequences": (8, 4),
}
"""By name how many prompts of which length; of sequences what a token costs after the prompts."""


def partc(path: str) -> Callable[[], Generate]:
    from partc.runtime import Request, load_generator

    def load() -> Generate:
        generator = load_generator(path, threads=1)
        return lambda prompts, count: [
            [*one.tokens]
            for one in generator.run([Request(prompt, max_tokens=count, ignore_end=True) for prompt in prompts])
        ]

    return load


def transformers(path: str) -> Callable[[], Generate]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)

    def load() -> Generate:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

        def generate(prompts: Prompts, count: int) -> Prompts:
            ids = torch.tensor(prompts)
            options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
            made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            found: Prompts = made[:, ids.shape[1] :].tolist()
            return found

        return generate

    return load


def llama(path: str, slots: int = SLOTS, threads: int = 1) -> Callable[[], Generate]:
    import xllamacpp

    def load() -> Generate:
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = slots * LENGTH, slots, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        server = xllamacpp.Server(params)

        def generate(prompts: Prompts, count: int) -> Prompts:
            request = {"prompt": prompts, "n_predict": count, "cache_prompt": False, "temperature": 0, "top_k": 1}
            found = server.handle_completions({**request, "ignore_eos": True, "stream": False})
            return [[int(word) for word in one["text"].split(";")[:-1]] for one in found["choices"]]

        return generate

    return load


def genai(path: str) -> Callable[[], Generate]:
    import numpy
    import onnxruntime_genai

    def load() -> Generate:
        model = onnxruntime_genai.Model(path)

        def generate(prompts: Prompts, count: int) -> Prompts:
            params = onnxruntime_genai.GeneratorParams(model)
            params.set_search_options(max_length=LENGTH, batch_size=len(prompts), do_sample=False)
            generator = onnxruntime_genai.Generator(model, params)
            generator.append_tokens(numpy.array(prompts, numpy.int32))
            made: Prompts = [[] for _ in prompts]
            for _ in range(count):
                generator.generate_next_token()
                for row, token in zip(made, generator.get_next_tokens(), strict=True):
                    row.append(int(token))
            return made

        return generate

    return load


SIDES: dict[str, Callable[[str], Callable[[], Generate]]] = {
    side.__name__: side for side in (partc, transformers, llama, genai)
}


def main() -> None:
    name, path = sys.argv[1:]
    vocabulary, draw = 32000, random.Random(0)

    def seconds(number: int, length: int, count: int) -> float:
        """CPU seconds of so many prompts of a length, and of so many tokens of each."""
        prompts = [[draw.randrange(3, vocabulary) for _ in range(length)] for _ in range(number)]
        begin = time.process_time()
        made = generate(prompts, count)
        took = time.process_time() - begin
        assert [len(tokens) for tokens in made] == [count] * number, [len(tokens) for tokens in made]
        return took

    load = SIDES[name](path)
    begin = time.process_time()
    generate = load()
    seconds(1, 4, 1)
    first = time.process_time() - begin
    answer([first - seconds(1, 4, 1)])
    for number in told():
        if number == len(MEASURES):  # most resident memory in bytes, while sequences use their caches
            Path("/proc/self/clear_refs").write_text("5")
            seconds(SLOTS, 4, TOKENS)
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            answer([1024 * int(status["VmHWM"].split()[0])])
        elif number == len(MEASURES) + 1:  # as in a server that has run for a while: memory is where it stays
            answer([seconds(1, 4, WARM)])
        elif number > len(MEASURES):  # tokens of the same prompts on all sides, each by itself
            same = random.Random(number)
            prompts = [[same.randrange(3, vocabulary) for _ in range(4 + 9 * index)] for index in range(8)]
            answer([token for prompt in prompts for token in generate([prompt], COMPARED)[0]])
        else:
            measure = [*MEASURES][number]
            prompts_of, length = MEASURES[measure]
            took = seconds(prompts_of, length, 1)
            if "sequence" in measure:
                took = (seconds(prompts_of, length, 1 + TOKENS) - took) / TOKENS / prompts_of
            answer([took])


if __name__ == "__main__":
    main()
