"""Words: names and texts of the product use the terms of GSPMD, DTensor, Megatron and ONNX.

A name of a class, a function or a module contains none of the words in `NOT`. `words.txt` lists the names that still do; it may only get
shorter: `python tests/test_words.py` removes the names that are gone. Fields and parameters that are participles or pronouns, the first
words of docstrings, and phrases of docstrings and messages that need a second reading are counted, and no count may rise.

    python tests/test_words.py 100     prints 100 docstrings, drawn at random with a fixed seed
    python tests/test_words.py counts  prints the counts as they are
"""

import ast
import random
import re
import sys
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
    "reshard": "redistribute",
    "plan, manifest": "config",
    "no one": "nobody",
}
"""By the term to use, the words that it stands for."""
PHRASES = {
    "'is no X': say 'is not an X'": (r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer|more\b)", 11),
    "'is none': say 'is not one', or name what it is instead": (
        r"(?<!there )(?<!There )\b(?:is|are) none\b(?! of them)",
        0,
    ),
    "'Those that ...', 'Of the ...': begin with the noun": (r"\A(?:Those|That|Of) ", 0),
    "'nobody': name who does not": (r"\bnobody\b", 3),
    "'Of X: ...': name the subject first": (r"^\s*Of [^.]*:", 2),
}
"""How often each is found today."""
VAGUE = "alike appended apart asked behind beside found given held kept left lying made one own said some taken there told wanted"
"""Names that leave open what a field or a parameter is: say the noun."""
VAGUE_NAMES = {"fields": 75, "parameters": 405}
"""How many fields and parameters have such a name today."""
NOUNLESS = frozenset({"found", "given", "made", "one", "some", "told"})
"""Names of variables that leave open what the variable is: fit for a few lines alone."""
LINES_OF_A_NAME = 5
FIRST_WORDS = {"By": 3, "How": 26, "Of": 0, "That": 0, "Those": 0, "What": 52, "Where": 6, "Which": 5, "Who": 1}
"""How many docstrings begin so today: begin with the subject or the verb instead."""


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


def vague_names() -> dict[str, int]:
    """How many fields of classes and parameters of functions have a name of `VAGUE`."""
    fields = parameters = 0
    for nodes in trees().values():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                targets = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
                stored = [
                    item
                    for item in ast.walk(node)
                    if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
                ]
                attributes = {item.id for item in targets if isinstance(item, ast.Name)}
                attributes |= {
                    item.attr for item in stored if isinstance(item.value, ast.Name) and item.value.id == "self"
                }
                fields += sum(name.strip("_") in VAGUE.split() for name in attributes)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                parameters += sum(
                    item.arg in VAGUE.split() for item in ast.walk(node.args) if isinstance(item, ast.arg)
                )
    return {"fields": fields, "parameters": parameters}


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def bound_in(node: ast.AST) -> set[str]:
    """The names that a node's own scope binds: the parameters of a function, and what it assigns; the targets of a comprehension."""
    if isinstance(node, COMPREHENSIONS):
        stored = [one for clause in node.generators for one in ast.walk(clause.target)]
        return {one.id for one in stored if isinstance(one, ast.Name)}
    parameters = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}  # type: ignore[attr-defined]
    inside = [] if isinstance(node, ast.Lambda) else [one for line in node.body for one in ast.walk(line)]  # type: ignore[attr-defined]
    return parameters | {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def lines_of_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[int]]:
    """Maps each parameter and variable of a function to the lines that have it, without those where an inner scope binds the name."""
    lines = {one.arg: [function.lineno] for one in ast.walk(function.args) if isinstance(one, ast.arg)}
    waiting: list[tuple[ast.AST, frozenset[str]]] = [(line, frozenset()) for line in function.body]
    while waiting:
        node, hidden = waiting.pop()
        if isinstance(node, ast.Name) and node.id not in hidden:
            lines.setdefault(node.id, []).append(node.lineno)
        if isinstance(node, (*COMPREHENSIONS, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
            hidden |= bound_in(node)
        waiting += [(child, hidden) for child in ast.iter_child_nodes(node)]
    return lines


def test_a_name_that_lives_long_says_what_it_is() -> None:
    functions = [
        (path, one)
        for path, nodes in trees().items()
        for one in nodes
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: '{name}' lives {max(lines) - min(lines)} lines"
        for path, function in functions
        for name, lines in lines_of_names(function).items()
        if name in NOUNLESS and max(lines) - min(lines) > LINES_OF_A_NAME
    ]
    assert not long, "say the noun:\n" + "\n".join(long)


def test_inner_scopes_have_names_of_their_own() -> None:
    text = "def f(x):\n    one = 1\n    y = [one for one in x]\n    def g(one):\n        return one\n    return lambda one: one\n"
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert lines_of_names(function) == {"x": [1, 3], "one": [2], "y": [3]}


def docstrings() -> Iterator[tuple[Path, int, str]]:
    """The file, line and text of each docstring, those after fields and constants included."""
    for path, nodes in trees().items():
        for node in nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield path, node.lineno, node.value.value


def first_words() -> dict[str, int]:
    """How many docstrings begin with each word of `FIRST_WORDS`."""
    counts = Counter(re.match(r"\w*", text).group() for _, _, text in docstrings())  # type: ignore[union-attr]
    return {word: counts[word] for word in FIRST_WORDS}


def test_vague_names_get_fewer() -> None:
    assert {name: count for name, count in vague_names().items() if count > VAGUE_NAMES[name]} == {}


def test_docstrings_begin_with_their_subject() -> None:
    assert {word: count for word, count in first_words().items() if count > FIRST_WORDS[word]} == {}


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
    if sys.argv[1:] == ["counts"]:
        print(vague_names(), first_words())
        sys.exit()
    if sys.argv[1:]:
        for path, line, text in random.Random(3).sample(list(docstrings()), int(sys.argv[1])):
            print(f"{path.relative_to(ROOT)}:{line}: {text.strip()}\n")
        sys.exit()
    there = unclear()
    BEFORE.write_text("\n".join(sorted(set(BEFORE.read_text().split()) & there)) + "\n")
