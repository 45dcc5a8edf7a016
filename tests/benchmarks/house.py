"""Counts what makes the source large or hard to follow, of one checkout or of two side by side.

    python tests/benchmarks/house.py [CHECKOUT] [AFTER]
    python tests/benchmarks/house.py --one-caller [CHECKOUT]

With `--one-caller` the private functions below 5 lines that one place of their file calls, each with its place; else a row for each count:
lines and files of the product and of tests; words of documents; modules that one other imports, and those below 60 lines of them; files
outside of the op table that name eight ops or more; private functions that are short or have one caller; loops that look for a name that
is free; functions that estimate how many bytes are there at once; attributes of the largest class; the largest folder.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parents[2]
FOLDERS = ("compiler", "runtime", "cli")
SHORT, LINES = 2, 5
"""The most statements of a short function, and the lines that it stays below, its docstring left out."""

Tree = dict[Path, ast.Module]


def main() -> None:
    """Prints a row for each count, or the short functions with one caller."""
    if sys.argv[1:2] == ["--one-caller"]:
        root = Path(sys.argv[2]) if sys.argv[2:] else HERE
        print("\n".join(f"{path.relative_to(root)}:{line} {name}" for path, line, name in one_caller(_trees(root))))
        return
    counts = [[*counted(Path(one))] for one in sys.argv[1:] or [HERE]]
    for row in zip(*counts, strict=True):
        print(f"{row[-1][0]:72}" + "".join(f"{number:>10,}" for _, number in row))


def counted(root: Path) -> Iterator[tuple[str, int]]:
    """All counts of a checkout by what they are."""
    trees = _trees(root)
    for folder in FOLDERS:
        yield f"lines of {folder}", sum(map(_lines, _below(trees, root / folder)))
    checker = root / "runtime" / "checker"
    yield (
        "lines of runtime without checker",
        sum(map(_lines, _below(trees, root / "runtime"))) - sum(map(_lines, _below(trees, checker))),
    )
    yield "lines of all three", sum(map(_lines, trees))
    yield "files of all three", len(trees)
    yield "folders of all three", len({path.parent for path in trees})
    yield "lines of tests", sum(map(_lines, sorted((root / "tests").rglob("*.py"))))
    texts = [
        path for path in root.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    guide = [path for path in texts if root / "samples" / "guide" in path.parents]
    yield "words of documents outside the guide", sum(map(_words, {*texts} - {*guide}))
    yield "words of the guide", sum(map(_words, guide))
    names = {path: _module(root, path) for path in trees}
    known = set(names.values())
    importers = Counter(
        name for path, tree in trees.items() for name in {*_imports(tree, names[path], path, known)} - {names[path]}
    )
    alone = [path for path, name in names.items() if importers[name] == 1 and path.name != "__init__.py"]
    yield "modules that one other imports", len(alone)
    yield "those of them below 60 lines", sum(_lines(path) < 60 for path in alone)
    table = root / "compiler" / "ops" / "families"
    ops = {
        name
        for path in _below(trees, table)
        for name in _texts(trees[path])
        if re.fullmatch(r"[A-Z][A-Za-z0-9]+", name)
    }
    many = [path for path, tree in trees.items() if table not in path.parents and len(ops & set(_texts(tree))) >= 8]
    yield "files outside of the op table that name eight ops", len(many)
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    yield "functions", len(functions)
    uses = Counter(name for tree in trees.values() for name in _names(tree))
    short = [one for one in functions if _is_short(one) and one.name.startswith("_") and uses[one.name] == 1]
    yield f"private functions of at most {SHORT} statements with one use", len(short)
    yield f"private functions below {LINES} lines that one place calls", len(list(one_caller(trees)))
    yield "loops that look for a free name", sum(map(_looks_for_a_name, trees.values()))
    yield "functions that add bytes at a begin and subtract them at an end", sum(map(_sums_what_is_alive, functions))
    sizes = {
        node.name: _attributes(node)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    largest = max(sizes, key=lambda name: sizes[name])
    yield "attributes of the largest class", sizes[largest]
    folders = Counter(path.parent for path in trees)
    yield "files of the largest folder", max(folders.values())


def _below(trees: Tree, folder: Path) -> list[Path]:
    return [path for path in trees if folder in path.parents]


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _words(path: Path) -> int:
    return len(path.read_text().split())


def _texts(tree: ast.AST) -> Iterator[str]:
    """Every text that is written in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _trees(root: Path) -> Tree:
    return {path: ast.parse(path.read_text()) for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))}


def one_caller(trees: Tree) -> Iterator[tuple[Path, int, str]]:
    """File, line and name of the private functions below `LINES` lines that are used in one place of their file, and called there.

    A function that is handed on as a value, or that keeps what it has computed, cannot be written where it is used.
    """
    for path, tree in trees.items():
        uses = Counter(_names(tree))
        called = {ast.unparse(one.func).rpartition(".")[2] for one in ast.walk(tree) if isinstance(one, ast.Call)}
        for one in ast.walk(tree):
            if not isinstance(one, ast.FunctionDef) or not one.name.startswith("_") or one.name.startswith("__"):
                continue
            body = one.body[1:] if ast.get_docstring(one) is not None else one.body
            short = bool(body) and (body[-1].end_lineno or 0) - body[0].lineno + 1 < LINES
            if short and uses[one.name] == 1 and one.name in called and not one.decorator_list:
                yield path, one.lineno, one.name


def _names(tree: ast.AST) -> Iterator[str]:
    """Every name that is read: of a variable, a function, an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _is_short(function: ast.FunctionDef) -> bool:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return 0 < len(body) <= SHORT and not any(
        isinstance(one, ast.If | ast.For | ast.While | ast.With | ast.Try) for one in body
    )


def _looks_for_a_name(tree: ast.AST) -> int:
    """How many loops ask whether a name is taken, and change it."""
    loops = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.While) and re.search(r"\bin\b|is_free", ast.unparse(one.test))
    ]
    return sum(any(isinstance(one, ast.JoinedStr) or _adds_text(one) for one in ast.walk(loop)) for loop in loops)


def _sums_what_is_alive(function: ast.FunctionDef) -> bool:
    """Whether a function of sizes both adds to and subtracts from one variable, or the items of one."""
    added, subtracted = set[str](), set[str]()
    for node in ast.walk(function):
        match node:
            case ast.AugAssign(target, ast.Add() | ast.Sub() as sign):
                pass
            case ast.Assign([ast.Subscript() as target], ast.BinOp(op=ast.Add() | ast.Sub() as sign)):
                pass
            case _:
                continue
        name = ast.unparse(target.value if isinstance(target, ast.Subscript) else target)
        (added if isinstance(sign, ast.Add) else subtracted).add(name)
    return bool(added & subtracted and re.search("size|bytes|amount|saved", ast.unparse(function)))


def _adds_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def _attributes(node: ast.ClassDef) -> int:
    """How many attributes the instances of a class have: fields, and what methods assign to `self`."""
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return len(fields | {one.attr for one in stored if isinstance(one.value, ast.Name) and one.value.id == "self"})


def _module(root: Path, path: Path) -> str:
    return "partc." + ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imports(tree: ast.AST, name: str, path: Path, known: set[str]) -> Iterator[str]:
    """The `known` files that a file imports, wherever it does."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            wanted = (f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names)
            yield from (one for one in wanted if one in known)


if __name__ == "__main__":
    main()
