"""The run list of a rank file: how the compiler decided to run its nodes; `rank_0000.run.json` next to `rank_0000.onnx`.

    {"program": "<SHA-256 of the rank file>",
     "rows": {"train": "R3 S0 A7 W3 S1 W7 U0"},
     "segments": [{"nodes": "0-4", "inputs": ["x"], "outputs": ["h"], "weights": ["w"]},
                  {"nodes": "6,8-9", "inputs": ["h", "g"], "outputs": ["g.sum"]}],
     "updates": [{"nodes": "11-12", "groups": ["11-12"]}],
     "buffers": [{"kind": "state", "members": ["w", "v"]}, {"kind": "step", "members": ["w.grad", "v.grad"]}]}

A row is a text of steps; the rank file's main graph has one under the name of its program, each function of a task one under its own name.

    S4    segment 4 runs: its nodes are one session
    R3    the receive of message 3 is posted        X3    message 3 is sent
    A7    collective 7 begins                       W7    message or collective 7 must be complete from here on
    L9    lookup 9 runs                             C12   node 12, a Copy, runs
    B14   node 14, a border of a body, is passed (`graph/bodies.py`)
    U0    update 0 runs: its nodes overwrite the rank's state
    0F3   the task of this name runs

Messages, collectives and lookups have their tags, in a task those of microbatch 0. Nodes are counted from 0 in the graph or function of the
row, without RankConstants and, in a function, without its constants. A node that is in no row is not needed. A rank file without a run list
runs by a simple one that the runtime makes (`program/default_list.py`).

Nodes that are correct only on one thread: onnxruntime's ScatterND with a reduction.

Its threads divide the updates among them, and two threads may add to the same element at once, so that one addition is lost: for
instance in the gradient of a looked-up table, where an id occurs twice. Such a node has a session of its own, with one thread, so that
all other nodes keep their threads. When 16,384 rows of 64 elements are added to 100 rows, two threads lose additions in some of 100
runs, and take as long as one thread (onnxruntime 1.31).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal

from partc.runtime.artifact.format import Record
from partc.runtime.artifact.graph.onnx_graph import graph_bodies, text_of
from pydantic import Field

if TYPE_CHECKING:
    from onnx import FunctionProto, NodeProto


_CELL = re.compile(r"([SRXAWLCUB])(\d{1,18})", re.ASCII)
_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


class SegmentRow(Record):
    """The nodes of a session: values that it reads, values that it gives to later steps, and the weights that it has.

    `target`: the target of all nodes; `threads`: how many threads a node may have, 0 for as many as the rank has.
    """

    nodes: str
    inputs: list[str] = Field([])
    outputs: list[str] = Field([])
    weights: list[str] = Field([])
    target: str = ""
    threads: int = 0


class UpdateRow(Record):
    """Nodes that overwrite what the rank keeps, in any order; `target` is the target of all.

    `groups`: nodes that run as one, of one function over operands that are next to each other in memory; without them each node runs by
    itself. `renewed`: shards that are cut out of parameters in each step, each with its new value, which takes its place.
    """

    nodes: str
    target: str = ""
    groups: list[str] = Field([])
    renewed: list[tuple[str, str]] = Field([])


class BufferRow(Record):
    """Values of one type that are next to each other in memory, in this order: gradients or shards of a step, or tensors of the state."""

    kind: Literal["step", "state"]
    members: list[str]


class RunList(Record):
    """The segments and updates of a rank file, by name the rows of steps that run them, and what is next to each other in memory."""

    program: str = ""
    rows: dict[str, str]
    segments: list[SegmentRow] = Field([])
    updates: list[UpdateRow] = Field([])
    buffers: list[BufferRow] = Field([])

    def text(self) -> str:
        """Returns the file's text, with a line for each row, segment and update."""
        rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in self.rows.items()]
        parts = [f'"program": {json.dumps(self.program)}', f'"rows": {{{_lines(rows)}}}']
        for key, records in (("segments", self.segments), ("updates", self.updates), ("buffers", self.buffers)):
            if records:
                lines = [json.dumps(one.model_dump(exclude_defaults=True)) for one in records]
                parts.append(f'"{key}": [{_lines(lines)}]')
        return "{" + ",\n ".join(parts) + "}\n"


def _lines(rows: Iterable[str]) -> str:
    return ",\n  ".join(rows)


def parsed_step(text: str) -> tuple[str, int]:
    """Returns the letter and the number of a step; an empty letter for a text that names a task."""
    found = _CELL.fullmatch(text)
    return ("", 0) if found is None else (found[1], int(found[2]))


def numbers_text(numbers: Iterable[int]) -> str:
    """Returns ascending numbers of nodes as a text: `0-4,6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def numbers_of(text: str, count: int) -> list[int]:
    """Returns the numbers of such a text, all below `count`; raises ValueError for another text."""
    numbers: list[int] = []
    for part in text.split(","):
        run = _RUN.fullmatch(part)
        first, last = (int(run[1]), int(run[2] or run[1])) if run is not None else (1, 0)
        if not (numbers[-1] if numbers else -1) < first <= last < count:
            raise ValueError(f"'{text[:40]}' is not a rising list of nodes of 0 to {count - 1}")
        numbers += range(first, last + 1)
    return numbers


Key = tuple[str, str]


def in_one_thread(functions: Iterable[FunctionProto]) -> set[Key]:
    """Returns the domain and name of each function with a node that needs one thread; a function may call those before it."""
    found: set[Key] = set()
    for function in functions:
        if any(wants_one_thread(node, found) for node in function.node):
            found.add((function.domain, function.name))
    return found


def wants_one_thread(node: NodeProto, functions: Collection[Key]) -> bool:
    """Whether a node, a node of its bodies or the function that it calls (if in `functions`) is a ScatterND with a reduction."""
    if node.op_type == "ScatterND" and node.domain in ("", "ai.onnx"):
        return text_of(node, "reduction") not in ("", "none")
    if (node.domain, node.op_type) in functions:
        return True
    bodies = graph_bodies(node) if node.attribute else ()
    return bool(bodies) and any(wants_one_thread(inner, functions) for body in bodies for inner in body.node)
