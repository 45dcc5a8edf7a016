"""Makes the run list of a rank file that has none: a segment between any two communications, each waited for at its place in the file.

So a rank file of any origin runs, by its order of nodes alone. A compiled one has a run list of its own (`artifact/run_list.py`), in which
communication overlaps computation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from partc.runtime.artifact.comm.border_node import BorderCall
from partc.runtime.artifact.comm.collective_node import read_call
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.graph.onnx_graph import integer_of, moved_statistics, op_and_path, reads
from partc.runtime.artifact.graph.optimizer_function import is_elementwise
from partc.runtime.artifact.graph.rank_constants import is_rank_constant, names_of
from partc.runtime.artifact.graph.row_function import is_rowwise
from partc.runtime.artifact.graph.targets import is_copy, target_of
from partc.runtime.artifact.run_list import (
    RunList,
    SegmentRow,
    UpdateRow,
    in_one_thread,
    numbers_text,
    wants_one_thread,
)

from ..artifact.format import DOMAIN, OPTIMIZER, RECV, SEND, TAG
from ..errors import ArtifactError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def default_list(model: ModelProto, name: str, where: str) -> RunList:
    """Returns the list of a program without tasks, with one row, called `name`; ArtifactError, naming `where`, for an invalid node."""
    graph = model.graph
    nodes = [node for node in graph.node if not is_rank_constant(node)]
    inputs, outputs = ({port.name for port in ports} for ports in (graph.input, graph.output))
    operands = [list(reads(node)) for node in nodes]
    fixed = {one.name for one in graph.initializer} | {one.values.name for one in graph.sparse_initializer}
    fixed = (fixed - inputs) | {*names_of(model)}
    ends = [[port.name for port in ports] for ports in (graph.input, graph.output)]
    refuse_unsound(where, fixed, ends[0], zip(nodes, operands, strict=True), ends[1])
    functions = {one.name for one in model.functions if is_elementwise(one) or is_rowwise(one)}
    cells, segments, updates = list[str](), list[list[int]](), list[list[int]]()
    for at, node in enumerate(nodes):
        if node.domain == DOMAIN:
            cells += _communication(at, node, where)
        elif node.domain == OPTIMIZER and node.op_type in functions and not outputs.isdisjoint(node.output):
            _add(cells, "U", updates, at, nodes)
        else:
            _add(cells, "S", segments, at, nodes)
    found = _segment_rows(model, nodes, operands, segments, outputs, fixed)
    row = " ".join(cell for cell in cells if cell[0] != "S" or found[int(cell[1:])].outputs)
    rows = [UpdateRow(nodes=numbers_text(members), target=target_of(nodes[members[0]])) for members in updates]
    return RunList(rows={name: row}, segments=found, updates=rows)


def _segment_rows(
    model: ModelProto,
    nodes: Sequence[NodeProto],
    operands: Sequence[Sequence[str]],
    segments: Sequence[Sequence[int]],
    outputs: Collection[str],
    fixed: Collection[str],
) -> list[SegmentRow]:
    """Returns the rows of segments, each a list of node numbers; outputs are the values that others or the program's `outputs` read."""
    segment_of = {at: number for number, members in enumerate(segments) for at in members}
    readers: dict[str, set[int]] = {name: {-1} for name in outputs}
    for at, values in enumerate(operands):
        for value in values:
            readers.setdefault(value, set()).add(segment_of.get(at, -1))
    single, rows = in_one_thread(model.functions), list[SegmentRow]()
    for number, members in enumerate(segments):
        chosen = [nodes[at] for at in members]
        made_values = dict.fromkeys(value for node in chosen for value in node.output if value)
        needed = dict.fromkeys(value for at in members for value in operands[at] if value not in made_values)
        moved = {value for node in chosen for value in moved_statistics(node)}
        rows.append(
            SegmentRow(
                nodes=numbers_text(members),
                inputs=[value for value in needed if value not in fixed],
                outputs=[value for value in made_values if value in moved or readers.get(value, set()) - {number}],
                weights=[value for value in needed if value in fixed],
                target=target_of(chosen[0]),
                threads=int(any(wants_one_thread(node, single) for node in chosen)),
            )
        )
    return rows


def _add(cells: list[str], letter: str, groups: list[list[int]], at: int, nodes: list[NodeProto]) -> None:
    """Adds a node to the last step if that has the same kind and target, else to a new step."""
    last = cells and cells[-1] == f"{letter}{len(groups) - 1}"
    if last and target_of(nodes[groups[-1][0]]) == target_of(nodes[at]):
        groups[-1].append(at)
    else:
        cells.append(f"{letter}{len(groups)}")
        groups.append([at])


def _communication(at: int, node: NodeProto, where: str) -> Iterable[str]:
    if is_copy(node):
        return (f"C{at}",)
    if node.op_type in (SEND, RECV):
        tag = integer_of(node, TAG, 0)
        return (f"X{tag}",) if node.op_type == SEND else (f"R{tag}", f"W{tag}")
    call = read_call(node, where)
    if isinstance(call, LookupCall):
        return (f"L{call.tag}",)
    if isinstance(call, BorderCall):
        return (f"B{at}",)
    return (f"A{call.tag}", f"W{call.tag}") if call.outputs else (f"A{call.tag}",)


_SHOWN = 10


def refuse_unsound(
    where: str,
    initializers: Iterable[str],
    inputs: Iterable[str],
    nodes: Iterable[tuple[NodeProto, Sequence[str]]],
    outputs: Iterable[str],
) -> None:
    """Raises ArtifactError, with the first problems, unless each value of the file `where` is made once and before its readers.

    `nodes` are pairs of a node and the values that it reads.
    """
    makers = dict.fromkeys(initializers, "an initializer")
    problems: list[str] = []

    def make(name: str, maker: str) -> None:
        if name in makers:
            problems.append(f"{where}: the value '{name}' is defined twice, by {makers[name]} and by {maker}")
        makers[name] = maker

    for name in inputs:
        make(name, "a model input")
    for node, needed in nodes:
        problems += [
            f"{where}: {op_and_path(node)} needs the value '{name}', which nothing before it makes"
            for name in dict.fromkeys(needed)
            if name not in makers
        ]
        for name in filter(None, node.output):
            make(name, op_and_path(node))
    problems += [f"{where}: no node makes the output '{name}'" for name in outputs if name not in makers]
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ArtifactError("\n".join([*problems[:_SHOWN], *more, "  help: the file was changed; compile again"]))
