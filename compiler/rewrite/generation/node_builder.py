"""Builds nodes that a rewrite adds to a model, named as if a module of one given name had made them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from partc.compiler.frontend.names import ONNXSCRIPT_SCOPES, TORCH_SCOPES
from partc.compiler.ir.graph import add_initializer
from partc.runtime.spellings import first_free, numbered


@functools.lru_cache(maxsize=256)
def _tensor(name: str, kind: str, shape: tuple[int, ...], data: bytes) -> ir.TensorProtocol:
    """Returns one shared tensor for all programs of a plan, so that it is stored once."""
    return ir.tensor(np.frombuffer(data, kind).reshape(shape), name=name)


class NodeBuilder:
    """Makes nodes, which wait until `put` inserts them into the graph, and constants, which are in the graph at once."""

    def __init__(self, graph: ir.Graph, path: str) -> None:
        self.graph, self.path = graph, path
        self.waiting: list[ir.Node] = []
        self._names = {value.name for node in graph for value in node.outputs} | {value.name for value in graph.inputs}
        self._scopes = {
            key for node in graph for key in (TORCH_SCOPES, ONNXSCRIPT_SCOPES) if key in node.metadata_props
        }

    def op(
        self, word: str, kind: str, inputs: Sequence[ir.Value | None], **attributes: int | Sequence[int]
    ) -> ir.Value:
        """Adds a node with one output, named after `word`, and returns the output."""
        return self.node(word, kind, inputs, 1, "", **attributes)[0]

    def node(
        self,
        word: str,
        kind: str,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        domain: str,
        **attributes: int | float | str | Sequence[int],
    ) -> Sequence[ir.Value]:
        """Adds a node, named after `word`, and returns its outputs."""
        name = self._free(f"{self.path}.{word}")
        made = [ir.Value(name=name if k == 0 else self._free(f"{name}.{k}")) for k in range(outputs)]
        attrs = ir.convenience.convert_attributes(attributes)
        node = ir.Node(domain, kind, inputs, attrs, outputs=made, name=name)
        if TORCH_SCOPES in self._scopes:
            node.metadata_props[TORCH_SCOPES] = repr(["", self.path, name])
        elif self._scopes:
            node.metadata_props[ONNXSCRIPT_SCOPES] = repr(["", self.path])
        self.waiting.append(node)
        return node.outputs

    def constant(self, word: str, numbers: npt.ArrayLike) -> ir.Value:
        """Returns a constant: float32 where `numbers` are, else int64. The same word gives the same constant."""
        name = f"{self.path}.constant.{word}"
        if name not in self.graph.initializers:
            given = np.asarray(numbers)
            array = given if given.dtype == np.float32 else given.astype(np.int64)
            add_initializer(self.graph, name, _tensor(name, array.dtype.str, array.shape, array.tobytes()))
        return self.graph.initializers[name]

    def put(self, *, before: ir.Node | None = None, after: ir.Node | None = None) -> None:
        """Inserts the waiting nodes into the graph: before or after a node, else at its end."""
        if before is not None:
            self.graph.insert_before(before, self.waiting)
        elif after is not None:
            self.graph.insert_after(after, self.waiting)
        else:
            self.graph.extend(self.waiting)
        self.waiting = []

    def _free(self, name: str) -> str:
        """Returns the name, with a number appended where it is taken."""
        name = first_free(name, self._names.__contains__, numbered)
        self._names.add(name)
        return name
