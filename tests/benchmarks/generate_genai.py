"""Tokens of onnxruntime-genai behind a prompt, in turns; for an interpreter that has it.

    python tests/benchmarks/generate_genai.py FOLDER PROMPT    # a folder with genai_config.json, a JSON file with the prompt

A step is a token. Says at its end which tokens there were.
"""

import json
import sys
import time
from pathlib import Path

import onnxruntime_genai
from turns import answer, told


def main() -> None:
    folder, prompt = sys.argv[1:]
    model = onnxruntime_genai.Model(folder)
    generator = onnxruntime_genai.Generator(model, onnxruntime_genai.GeneratorParams(model))
    generator.append_tokens(json.loads(Path(prompt).read_text()))
    made = list[int]()
    answer([])
    for count in told():
        begin, worked = time.perf_counter(), time.process_time()
        for _ in range(count):
            generator.generate_next_token()
            made.append(int(generator.get_next_tokens()[0]))
        answer([time.perf_counter() - begin, time.process_time() - worked])
    print(json.dumps(made))


if __name__ == "__main__":
    main()
