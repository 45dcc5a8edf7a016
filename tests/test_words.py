"""Words: names and texts of the product use the terms of GSPMD, DTensor, Megatron and ONNX.

A name of a class, a function or a module contains none of the words in `NOT`. `words.txt` lists the names that still do; it may only get
shorter: `python tests/test_words.py` removes the names that are gone. Phrases of docstrings and messages that need a second reading are
counted, and no count may rise.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from source_trees import nodes_of

ROOT = Path(__file__).parent.parent
BEFORE = Path(__file__).with_name("words.txt")
NOT = {
    "sharded, shard": "cut cuts uncut piece pieces",
    "unsharded, replicated, full": "whole",
    "partial": "term terms",
    "partial or saved, or state": "kept held",
    "message, reported, announced": "told tell tells said saying",
    "outputs, results": "made",
    "inputs": "given",
    "located, is_inside": "lies lying",
    "requested": "asked unasked wanted",
    "parameter_server": "serve serves served serving",
    "staleness": "late",
    "typical": "middling",
    "avoidable": "lost",
    "reduce, broadcast": "rooted",
    "cotangent": "duals tangent",
    "model_collectives, or what is written": "written",
    "microbatch, coalesced, shard, rank program": "part parts",
    "task, action": "cell cells",
    "trainable": "learned",
    "rank": "worker",
    "global, local": "logical physical",
    "layout": "distribution",
    "reshard": "adapter redistribute",
    "plan, manifest": "config",
    "no one": "nobody",
}
"""By the term to use, the words that it stands for."""
PHRASES = {
    "'is no X': say 'is not an X'": (r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer|more\b)", 17),
    "'is none': say 'is not one', or name what it is instead": (
        r"(?<!there )(?<!There )\b(?:is|are) none\b(?! of them)",
        0,
    ),
    "'Those that ...', 'Of the ...': begin with the noun": (r"\A(?:Those|That|Of) ", 0),
    "'nobody': name who does not": (r"\bnobody\b", 4),
    "'Of X: ...': name the subject first": (r"^\s*Of [^.]*:", 5),
}
"""How often each is found today."""


def words(name: str) -> set[str]:
    """The words of a name in snake_case or CamelCase, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)}


def trees() -> dict[Path, tuple[ast.AST, ...]]:
    """By file the nodes of its tree."""
    files = (path for folder in ("compiler", "runtime", "cli") for path in sorted((ROOT / folder).rglob("*.py")))
    return {path: nodes_of(path) for path in files}


def names() -> Iterator[str]:
    """The names of modules, classes and functions."""
    for path, nodes in trees().items():
        yield path.stem
        yield from (one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.ClassDef))


def unclear() -> set[str]:
    forbidden = {word for listed in NOT.values() for word in listed.split()}
    return {name for name in names() if words(name) & forbidden}


def test_new_names_are_the_fields_words() -> None:
    new = sorted(unclear() - set(BEFORE.read_text().split()))
    say = {word: term for term, listed in NOT.items() for word in listed.split()}
    wrong = [f"{name}: say {say[word]} for '{word}'" for name in new for word in sorted(words(name) & say.keys())]
    assert not wrong, "\n".join(wrong)


def test_a_name_is_taken_apart() -> None:
    assert words("_HTTPServer_keptParts") == {"http", "server", "kept", "parts"}


def test_phrases_get_fewer() -> None:
    texts = [
        one.value
        for nodes in trees().values()
        for one in nodes
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
    found = Counter(
        {name: sum(len(re.findall(law, text, re.M)) for text in texts) for name, (law, _) in PHRASES.items()}
    )
    assert {name: number for name, number in found.items() if number > PHRASES[name][1]} == {}


if __name__ == "__main__":
    there = unclear()
    BEFORE.write_text("\n".join(sorted(set(BEFORE.read_text().split()) & there)) + "\n")
