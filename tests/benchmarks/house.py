"""Counts what makes the source large or hard to follow, of one checkout or of two side by side.

    python tests/benchmarks/house.py [CHECKOUT] [AFTER]
    python tests/benchmarks/house.py --one-caller [CHECKOUT]

With `--one-caller` the private functions below 5 lines that one place of their file calls, each with its place; else a row for each count:
lines of the product; such functions, and those of one or two statements; names taken from values that may have none; loops that look
for a name that is free; functions that estimate how many bytes are there at once; fields of the largest record; files that import each
other in a circle, imports for types and inside of functions counted; the largest folder.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

HERE = Path(__file__).parents[2]
FOLDERS = ("compiler", "runtime", "cli")
AFTER_LOCALIZE = ("tasks", "lower", "pipelines", "targets", "emit")
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
        own = [path for path in trees if path.relative_to(root).parts[0] == folder]
        yield f"lines of {folder}", sum(len(path.read_text().splitlines()) for path in own)
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    yield "functions", len(functions)
    uses = Counter(name for tree in trees.values() for name in _names(tree))
    alone = [one for one in functions if _is_short(one) and one.name.startswith("_") and uses[one.name] == 1]
    yield f"private functions of at most {SHORT} statements with one use", len(alone)
    yield f"private functions below {LINES} lines that one place calls", len(list(one_caller(trees)))
    late = [
        path
        for path in trees
        if path.relative_to(root).parts[:1] == ("compiler",) and path.parent.name in AFTER_LOCALIZE
    ]
    yield 'places after localize that say `.name or ""`', sum(path.read_text().count('.name or ""') for path in late)
    yield "loops that look for a free name", sum(map(_looks_for_a_name, trees.values()))
    yield "functions that add bytes at a begin and subtract them at an end", sum(map(_sums_what_is_alive, functions))
    sizes = {
        node.name: _fields(node) for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    largest = max(sizes, key=lambda name: sizes[name])
    yield f"fields of the largest record ({largest})", sizes[largest]
    yield "files in circles of imports", len(_in_circles(root, trees))
    folders = Counter(path.parent for path in trees)
    most = max(folders, key=lambda path: folders[path])
    yield f"files of the largest folder ({most.relative_to(root)})", folders[most]
    yield "folders with more than 20 files", sum(count > 20 for count in folders.values())


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


def _fields(record: ast.ClassDef) -> int:
    """The annotated fields of a class."""
    return sum(isinstance(one, ast.AnnAssign) for one in record.body)


def _in_circles(root: Path, trees: Tree) -> set[str]:
    """The files that are in some circle: those that fall away one circle after the other, each cut at one import."""
    names = {path: _module(root, path) for path in trees}
    known = set(names.values())
    graph = {names[path]: {*_imports(tree, names[path], path, known)} - {names[path]} for path, tree in trees.items()}
    found = set[str]()
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return found
        except CycleError as error:
            circle = error.args[1]
            found.update(circle)
            graph[circle[1]].discard(circle[0])
            graph[circle[0]].discard(circle[1])


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
