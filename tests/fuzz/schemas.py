"""Random schemas, and answers of random logits that they bind: each is valid JSON that fits its schema, ends within its most tokens, has at
most one space between its parts, and is the same where the vocabulary is in shards.

    python tests/fuzz/schemas.py --cases 1000 --seed 1 [--tokens 128000]

With `--tokens` the tokenizer has as many; the CPU time of a mask, of all shards of a token, is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from partc.runtime.artifact.generation import GenerationRecord
from partc.runtime.generation.changes import changes_of
from partc.runtime.generation.request import Request, faults_of
from partc.runtime.generation.schema import SchemaBound

_TEXTS = (
    '{"',
    '"}',
    '": ',
    '", "',
    "[[",
    "}}",
    "]]",
    '{"a": ',
    "  ",
    "   ",
    "10",
    "null",
    "true",
    "\\\\",
    '\\"',
    "],",
    "ab",
    "é",
    "\n\n",
)
"""Tokens of several letters, some of which begin or end several parts at once."""


def tokenizer_file(folder: Path, size: int = 0) -> tuple[Path, int]:
    """A tokenizer of all bytes and a few texts, or of `size` texts, and the token that ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = ["".join(part for part, _ in step.pre_tokenize_str(text)) for text in _TEXTS]
    pieces, draw = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *texts]), random.Random(0)
    while len(pieces) < size - 1:  # words, with the space before them, and numbers
        letters = "0123456789" if draw.random() < 0.1 else "abcdefghijklmnopqrstuvwxyz"
        pieces[draw.choice(["", "\u0120"]) + "".join(draw.choices(letters, k=draw.randint(2, 9)))] = None
    pieces["<end>"] = None
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = step, decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json", len(pieces) - 1


def drawn_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "object", "array", "anyOf"]
    kind = rng.choice(kinds if depth else kinds[:6])
    match kind:
        case "string":
            least = rng.choice([0, 0, 3])
            return {
                "type": kind,
                **rng.choice(
                    [
                        {},
                        {"minLength": least},
                        {"maxLength": least + 4},
                        {"pattern": "^[a-c]{2,5}$"},
                        {"pattern": "^([0-9]+-)+x$"},
                    ]
                ),
            }
        case "integer":
            return {"type": kind, **rng.choice([{}, {"minimum": -7, "maximum": 12}, {"minimum": 100}])}
        case "enum":
            return {"enum": rng.sample(["red", "green", 3, None, True, 'a"b'], 2)}
        case "object":
            names = rng.sample(["a", "b", "name", "x y", 'q"'], rng.randint(0, 4))
            properties = {name: drawn_schema(rng, depth - 1) for name in names}
            required = [name for name in names if rng.random() < 0.6]
            return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            limits = rng.choice([{}, {"minItems": 2}, {"maxItems": 3}])
            return {"type": kind, "items": drawn_schema(rng, depth - 1), **limits}
        case "anyOf":
            return {"anyOf": [drawn_schema(rng, depth - 1) for _ in range(2)]}
    return {"type": kind}


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"of": {"type": "integer"}, "in": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["of", "in"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
FREE: dict[str, Any] = {"type": "object"}


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value fits a schema of those that are drawn here."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    if "anyOf" in schema:
        return any(fits(value, one, root) for one in schema["anyOf"])
    match schema["type"], value:
        case "string", str():
            least, most = schema.get("minLength", 0), schema.get("maxLength", 10**6)
            return least <= len(value) <= most and re.search(schema.get("pattern", ""), value) is not None
        case "boolean", bool():
            return True
        case (("integer" | "number"), bool()):
            return False
        case "integer", int():
            return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        case ("number", int() | float()) | ("null", None):
            return True
        case "object", dict():
            known = schema.get("properties", {})
            closed = schema.get("additionalProperties", True) is not False
            return all(name in value for name in schema.get("required", ())) and all(
                fits(inner, known[name], root) if name in known else closed for name, inner in value.items()
            )
        case "array", list():
            least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
            return bool(least <= len(value) <= most) and all(fits(inner, schema["items"], root) for inner in value)
    return False


MASKS: list[float] = []
"""The CPU seconds of each token's masks."""


@cache
def _tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def answer(
    request: Request, record: GenerationRecord, shards: Sequence[int], seed: int, scale: float
) -> tuple[list[int], str]:
    """The tokens that random logits make with a mask of each shard, and why there are no more."""
    rng, tokens = np.random.default_rng(seed), list[int]()
    liked = rng.integers(0, record.vocabulary, seed % 3 * 8)  # a model repeats itself
    changes = [change for _ in shards for change in changes_of(request, record)]
    for _ in range(request.most(record)):
        logits = (rng.standard_normal(record.vocabulary) * scale).astype(np.float32)
        logits[liked] += 4 * scale
        begin = 0
        before = time.process_time()
        for size, change in zip(shards, changes, strict=True):
            change.change(logits[begin : begin + size], begin, tokens)
            begin += size
        MASKS.append(time.process_time() - before)
        assert np.isfinite(logits).any(), (tokens, "nothing may follow")
        tokens.append(int(logits.argmax()))
        if tokens[-1] in request.stop:
            return tokens, "stop"
    return tokens, "length"


def run(case: int, seed: int, path: Path, end: int) -> str:
    """One case, and how it ended; AssertionError."""
    rng = random.Random(f"{seed}/{case}")
    schema = {3: TREE, 7: FREE}.get(case % 10, drawn_schema(rng))
    vocabulary, most = end + 1 + rng.choice([0, 3, 12]), rng.choice([12, 40, 100])
    record = GenerationRecord(
        tokens="t", position="p", count="c", next="n", logits="l", vocabulary=vocabulary, slots=1, length=512, chunk=4
    )
    request = Request([1], max_tokens=most, stop=[end], schema=SchemaBound(str(path), json.dumps(schema)))
    if faults := [*faults_of(request, record)]:
        assert "is found within" in faults[0], (schema, faults)
        return "refused"
    cut, scale = sorted(rng.sample(range(1, vocabulary), 2)), rng.choice([1.0, 5.0])
    shards = [cut[0], cut[1] - cut[0], vocabulary - cut[1]]
    tokens, finish = answer(request, record, shards, case, scale)
    assert (tokens, finish) == answer(request, record, [vocabulary], case, scale), schema
    text = _tokenizer(str(path)).decode(tokens)
    assert finish == "stop", (schema, most, text)
    assert fits(json.loads(text), schema, schema), (schema, text)
    assert not re.search(r"\s\s|\n", re.sub(r'"(\\.|[^"\\])*"', '""', text)), text
    return "valid"


def main() -> None:
    """Runs the cases and counts how they ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int)
    parser.add_argument("--tokens", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, end = tokenizer_file(Path(folder), options.tokens)
        cases = range(options.cases) if options.case is None else [options.case]
        ends = Counter(run(case, options.seed, path, end) for case in cases)
        print(f"{ends.total()} cases: {ends['valid']} valid, {ends['refused']} refused")
        if options.tokens:
            first, *_, last = (1e3 * one for one in statistics.quantiles(MASKS, n=100))
            usual = 1e3 * statistics.median(MASKS)
            print(
                f"{len(MASKS)} masks of {end + 1:,} tokens: median {usual:.2f} ms, 1 % below {first:.2f}, 1 % above {last:.2f}"
            )


if __name__ == "__main__":
    main()
