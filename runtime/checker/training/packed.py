"""Proves that what is sent in eight bits is unpacked with its own scales, and that the stored rounding error is what was not sent.

    codes, scales of one QuantizeLinear, moved alike        what a DequantizeLinear reads
    rest.next = carried - DequantizeLinear(codes, scales)   where codes, scales pack carried = blocks + rest

Codes with the scales of another bucket have fitting shapes and types, so no other check would report them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import ModelProto, NodeProto
from partc.runtime.artifact.format import DOMAIN, REST, ROW, TAG, Manifest
from partc.runtime.artifact.graph.onnx_graph import node_title, path_of
from partc.runtime.errors import Violation

_PACKS, _UNPACKS = "QuantizeLinear", "DequantizeLinear"
_AGAIN = "compile the model again"


def check_packed(manifest: Manifest, models: Mapping[int, ModelProto]) -> Iterator[Violation]:
    """Yields the violations of each rank file that sends in eight bits; the files' graphs are already checked."""
    files = {manifest.program(rank): model for rank, model in models.items()}
    for file, model in (
        files.items() if any(node.op_type == _PACKS for one in files.values() for node in one.graph.node) else ()
    ):
        yield from _Packed(file, model, manifest).violations()


class _Packed:
    """The nodes of a rank file by the values that they make."""

    def __init__(self, file: str, model: ModelProto, manifest: Manifest) -> None:
        self.file, self.nodes, self.manifest = file, model.graph.node, manifest
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.packs = {node.output[0]: node for node in self.nodes if node.op_type == _PACKS}

    def violations(self) -> Iterator[Violation]:
        """Yields all violations of the file."""
        for node in self.nodes:
            if node.op_type == _UNPACKS and (codes := self.origin(node.input[0]))[0] in self.packs:
                pack, moves = self.packs[codes[0]], codes[1]
                if self.origin(node.input[1]) != (self.origin(pack.input[1])[0], moves):
                    fact = f"it reads the codes of '{pack.output[0]}' and not its scales '{pack.input[1]}', moved alike"
                    yield Violation(self.file, fact, node_title(node), path_of(node), _AGAIN)
        for record in self.manifest.state:
            node = self.makers.get(record.next)
            if record.kind == REST and node is not None and not self.is_left(node, record.value):
                fact = f"it makes '{record.next}', and not as the difference of what is packed with '{record.value}' and what is sent"
                yield Violation(self.file, fact, node_title(node), path_of(node), _AGAIN)

    def origin(self, name: str) -> tuple[str, tuple[object, ...]]:
        """The value that Reshapes and collectives have brought here as `name`, and the collectives between."""
        moves: list[object] = []
        while (node := self.makers.get(name)) is not None and (node.op_type == "Reshape" or node.domain == DOMAIN):
            if node.domain == DOMAIN:
                moves.append((node.op_type, [one for one in node.attribute if one.name not in (TAG, ROW)]))
            name = node.input[0] if node.input else ""
        return name, tuple(moves)

    def is_left(self, node: NodeProto, rest: str) -> bool:
        """Whether a node computes the rounding error of the gradients that were packed with the error `rest` of the last step."""
        if node.op_type != "Sub" or (carried := self.makers.get(node.input[0])) is None:
            return False
        sent = self.makers.get(node.input[1])
        pack = self.packs.get(sent.input[0]) if sent is not None and sent.op_type == _UNPACKS else None
        return (
            carried.op_type == "Add" and rest in carried.input and pack is not None and pack.input[0] == node.input[0]
        )
