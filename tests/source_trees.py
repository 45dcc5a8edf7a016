"""The syntax trees of Python files, parsed once for all tests of structure, names and words."""

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a file's tree, as `ast.walk` visits them, which no test changes."""
    found = tuple(ast.walk(ast.parse(path.read_text())))
    gc.freeze()  # they stay until the process ends, and the collector of cycles need not visit a million of them
    return found
