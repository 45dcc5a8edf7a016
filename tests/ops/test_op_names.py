"""What an op does is said by its entry and by the table of kernels: no other file lists ops, but for what it has to say of its own."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

from partc.compiler.ops.registry import entries
from partc.compiler.ops.rule import OWN
from source_trees import nodes_of

ROOT = Path(__file__).parents[2]
FEW = 8
"""So many names make a table of ops."""
PATTERNS = "reads or writes these nodes: forms of a graph that it knows"
SHAPES = "the rule of shapes of each op, for an engine that is below the op table"
MEANING = "proves or follows what these ops mean, which no column says"
ALLOWED = {
    "compiler/ops/families/*": "the entries themselves",
    "runtime/artifact/graph/kernels.py": "the table of kernels",
    "compiler/frontend/*": PATTERNS,
    "compiler/rewrite/*": PATTERNS,
    "compiler/training/*": PATTERNS,
    "compiler/plan/training/*": PATTERNS,
    "compiler/comparison/rounding.py": PATTERNS,
    "cli/machine/kernels.py": PATTERNS,
    "runtime/artifact/graph/*_function.py": PATTERNS,
    "runtime/artifact/graph/onnx_graph.py": PATTERNS,
    "compiler/analysis/shape_*.py": SHAPES,
    "compiler/analysis/least_sizes.py": SHAPES,
    "compiler/cost/memory.py": MEANING,
    "compiler/cost/turn.py": MEANING,
    "compiler/lower/reshard.py": PATTERNS,
    "compiler/sharding/*": MEANING,
    "compiler/lower/ring.py": PATTERNS,
    "compiler/nn/batching.py": MEANING,
    "compiler/nn/layers.py": PATTERNS,
    "compiler/tasks/gradient_norm.py": PATTERNS,
    "compiler/lower/eight_bits.py": PATTERNS,
    "compiler/tasks/packed_sums.py": PATTERNS,
    "compiler/unroll.py": MEANING,
    "runtime/checker/across/tree_sums.py": MEANING,
    "runtime/checker/across/expert_rows.py": MEANING,
    "runtime/checker/across/orders.py": MEANING,
    "compiler/placement/computed_at_readers.py": MEANING,
    "compiler/proposal/*": MEANING,
    "compiler/targets/of_ops.py": MEANING,
    "compiler/emit/manifest.py": MEANING,
    "runtime/checker/training/sharded_caches.py": MEANING,
    "runtime/checker/training/slot_rows.py": MEANING,
    "runtime/checker/training/value_numbering.py": MEANING,
    "runtime/checker/across/equal_nodes.py": MEANING,
    "runtime/checker/graph/types.py": MEANING,
}
"""By pattern of a file why it names eight ops or more."""
MOST = {MEANING: 80, PATTERNS: 70}


def names_in(path: Path, ops: frozenset[str]) -> set[str]:
    """The op names among the texts of a file, docstrings left out: one by itself, or a list of them. None where all its words have few."""
    if len(ops.intersection(re.findall(r"\w+", path.read_text()))) < FEW:
        return set()
    nodes = list(nodes_of(path))
    docstrings = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
    constants = [one.value for one in nodes if isinstance(one, ast.Constant) and id(one) not in docstrings]
    lists = [{*text.split()} for text in constants if isinstance(text, str)]
    return {name for names in lists if names <= ops for name in names}


def test_ops_are_listed_by_the_op_table_alone() -> None:
    ops = frozenset(entry.op_type for entry in entries() if entry.domain != OWN)
    tables = dict[str, int]()
    for folder in ("compiler", "runtime", "cli"):
        for path in (ROOT / folder).rglob("*.py"):
            if (count := len(names_in(path, ops))) >= FEW:
                tables[str(path.relative_to(ROOT))] = count
    new = {file: count for file, count in tables.items() if not any(fnmatch(file, pattern) for pattern in ALLOWED)}
    assert new == {}, "say it in an entry of the op table, or in runtime/artifact/graph/kernels.py"
    unused = [pattern for pattern in ALLOWED if not any(fnmatch(file, pattern) for file in tables)]
    assert unused == [], "these have few names now: leave them out"
    large = [
        (file, count)
        for file, count in tables.items()
        for pattern, why in ALLOWED.items()
        if fnmatch(file, pattern) and count > MOST.get(why, count)
    ]
    assert large == []
