"""Writes the graph for Graphviz or Mermaid: a frame for each class of ranks, a box for each module, messages as thick arrows with bytes.

    subgraph r3["rank 3"]                          subgraph cluster_3 { label="rank 3";
    b0["conv1<br>1 node"] --> b1["relu ..."]       b0 -> b1; b2 -> b5 [label="4704*batch", penwidth=2]; }

All boxes are modules of one depth: the deepest with at most `MOST_BOXES` boxes, unless the user chooses one. The bytes of a module's
collectives are in its box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto
from partc.cli.output.stats import moved_text
from partc.cli.report.graph import RankClass, nodes_once
from partc.runtime.artifact.comm.collectives import GROUP_OPS
from partc.runtime.artifact.format import BYTES, DOMAIN, PATH, PEER, RECV, SEND
from partc.runtime.artifact.graph.onnx_graph import integer_of, metadata_of, reads
from partc.runtime.artifact.ranks import ranks_text
from partc.runtime.units import count

MOST_BOXES = 60


@dataclass
class Box:
    """A module of a class of ranks: its number of nodes, and for each op the bytes of its collectives."""

    path: str
    nodes: int = 0
    collectives: dict[str, list[str]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yields the lines of text in the box."""
        yield self.path
        if self.nodes:
            yield count(self.nodes, "node")
        for op, texts in self.collectives.items():
            yield f"{len(texts)} {op}: {moved_text(texts)} bytes"


@dataclass
class Drawing:
    """A title and boxes for each class, and edges between boxes with the bytes of their messages, empty within a class."""

    frames: list[tuple[str, list[int]]] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    edges: dict[tuple[int, int], list[str]] = field(default_factory=dict)


def graph_text(classes: Sequence[RankClass], format: str, depth: int | None = None) -> str:
    """Returns the graph of these classes as text for `dot` or `mermaid`."""
    return _WRITERS[format](_drawing(classes, depth))


def _drawing(classes: Sequence[RankClass], depth: int | None) -> Drawing:
    nodes = [nodes_once(one) for one in classes]
    paths = [[metadata_of(node, PATH) or node.name or next(iter(node.output), "") for node in some] for some in nodes]
    depth = depth or _depth(paths)
    drawing = Drawing()
    makers: list[dict[str, int]] = []
    for rank_class, class_nodes, own in zip(classes, nodes, paths, strict=True):
        numbers: dict[str, int] = {}
        makers_of_class: dict[str, int] = {}
        read = {name for node in class_nodes for name in reads(node)}
        for node, path in zip(class_nodes, own, strict=True):
            delivered = _is(node, RECV) and read.isdisjoint(node.output)
            if _is(node, SEND) or (_is(node, RECV) and not delivered):
                continue
            module = f"output {node.output[0]}" if delivered else ".".join(path.split(".")[:depth])
            if module not in numbers:
                numbers[module] = len(drawing.boxes)
                drawing.boxes.append(Box(module))
            box = drawing.boxes[numbers[module]]
            if node.domain == DOMAIN and node.op_type in GROUP_OPS:
                box.collectives.setdefault(node.op_type, []).append(metadata_of(node, BYTES, "unknown"))
            else:
                box.nodes += not delivered
            makers_of_class |= dict.fromkeys(node.output, numbers[module])
        makers.append(makers_of_class)
        title = f"{'ranks' if len(rank_class.ranks) > 1 else 'rank'} {ranks_text(rank_class.ranks)}"
        drawing.frames.append((title, list(numbers.values())))
    class_of = {rank: k for k, one in enumerate(classes) for rank in one.ranks}
    for k, class_nodes in enumerate(nodes):
        _add_edges(drawing, class_nodes, makers, k, class_of)
    return drawing


def _depth(paths: Sequence[Sequence[str]]) -> int:
    """Returns the deepest depth of modules with at most `MOST_BOXES` boxes."""
    parts = [{tuple(path.split(".")) for path in some} for some in paths]
    deepest = max((len(path) for some in parts for path in some), default=1)
    numbers = {d: sum(len({path[:d] for path in some}) for some in parts) for d in range(1, deepest + 1)}
    return max((d for d, number in numbers.items() if number <= MOST_BOXES), default=1)


def _is(node: NodeProto, op: str) -> bool:
    return node.domain == DOMAIN and node.op_type == op


def _add_edges(
    drawing: Drawing,
    nodes: Sequence[NodeProto],
    makers: Sequence[Mapping[str, int]],
    own: int,
    class_of: Mapping[int, int],
) -> None:
    """Adds edges to each box that reads a value in a class, from the box that makes it there, or on the rank that sends it.

    A value has the same name on every rank. A value from a class that is not drawn has no edge.
    """
    received: dict[str, tuple[str, int | None]] = {}
    sent: set[tuple[int, int, str]] = set()
    for node in nodes:
        if _is(node, RECV):
            peer = class_of.get(integer_of(node, PEER, -1))
            received |= dict.fromkeys(node.output, (metadata_of(node, BYTES, "unknown"), peer))
        target = makers[own].get(next(filter(None, node.output), ""))
        if target is None:
            continue
        for name in node.output if _is(node, RECV) else reads(node):
            bytes, peer = received.get(name, ("", own))
            source = makers[peer].get(name) if peer is not None else None
            if source is None or source == target or (source, target, name) in sent:
                continue
            sent.add((source, target, name))
            drawing.edges.setdefault((source, target), []).extend([bytes] if bytes else [])


def _dot(drawing: Drawing) -> str:
    lines = ["digraph partc {", "  rankdir=TB;", '  node [shape=box, style=rounded, fontname="sans-serif"];']
    for k, (title, boxes) in enumerate(drawing.frames):
        lines += [f"  subgraph cluster_{k} {{", f"    label={_quoted([title])};"]
        lines += [f"    b{at} [label={_quoted([*drawing.boxes[at].lines()])}];" for at in boxes]
        lines.append("  }")
    for (source, target), texts in drawing.edges.items():
        about = f" [label={_quoted([moved_text(texts)])}, penwidth=2, color=orangered]" if texts else ""
        lines.append(f"  b{source} -> b{target}{about};")
    return "\n".join([*lines, "}"])


def _quoted(lines: Sequence[str]) -> str:
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'


_ENTITIES = {"#": "#35;", "&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;"}


def _mermaid(drawing: Drawing) -> str:
    lines = ["flowchart TB"]
    for k, (title, boxes) in enumerate(drawing.frames):
        lines.append(f"  subgraph r{k}[{_labelled([title])}]")
        lines += [f"    b{at}[{_labelled([*drawing.boxes[at].lines()])}]" for at in boxes]
        lines.append("  end")
    for (source, target), texts in drawing.edges.items():
        arrow = f"==>|{_labelled([moved_text(texts)])}|" if texts else "-->"
        lines.append(f"  b{source} {arrow} b{target}")
    return "\n".join(lines)


def _labelled(lines: Sequence[str]) -> str:
    return '"' + "<br>".join("".join(_ENTITIES.get(letter, letter) for letter in line) for line in lines) + '"'


_WRITERS: Mapping[str, Callable[[Drawing], str]] = {"dot": _dot, "mermaid": _mermaid}
