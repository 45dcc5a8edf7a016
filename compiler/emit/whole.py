"""Writes an unsharded model as a file that replaces another at once: small weights inside, large ones next to it in `.data`."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend.exported import write_declared
from partc.compiler.frontend.functions import CALLS
from partc.compiler.frontend.names import node_paths
from partc.compiler.frontend.source import Source
from partc.compiler.ir.graph import is_inside
from partc.runtime.files.replace import replacing_together

INLINE_BYTES = 256 * 1024 * 1024
"""Weights of more bytes stand in a file of their own; protobuf allows two gigabytes in all."""


def save_unsharded(model: ir.Model, path: Path, option: str, inline_bytes: int = INLINE_BYTES) -> None:
    """Writes the model into `path`, and weights of more than `inline_bytes` beside it, into `path` and `.data`.

    Raises CompileError, which names the `option` that gives another name, where that would overwrite weights that the model is read
    from.
    """
    graphs = list(model.graphs())
    weights = [value.const_value for graph in graphs for value in graph.initializers.values() if value.const_value]
    large = sum(tensor.nbytes for tensor in weights) > inline_bytes
    data = path.with_name(f"{path.name}.data")
    read = {Path(tensor.path).resolve() for tensor in weights if isinstance(tensor, ir.ExternalTensor)}
    for file in (path, *([data] if large else [])):
        if file.resolve() in read:
            fact = f"the model's weights are read from '{file.name}'"
            raise CompileError(
                Problem(str(file), fact, "they are not overwritten", f"choose another name for {option}")
            )
    with replacing_together(path) as scratch:
        if large:
            ir.save(model, scratch / path.name, external_data=data.name)
        else:
            ir.external_data.load_to_model(model)
            ir.save(model, scratch / path.name)


def write_exported(source: Source, path: Path) -> None:
    """Writes a model into `path`, and large weights beside it into `path` and `.data`; the file compiles to the same programs.

    What no node has goes into metadata (`frontend/exported.py`). Raises CompileError where that would overwrite weights that the model is
    read from, and for a model with local maps.
    """
    from partc.compiler.training.trainable import declares_trainable, trainable_names

    model = source.model
    if any(is_inside(node) for node in model.graph):
        fact = "the model has local maps, which a file of plain ONNX cannot express"
        raise CompileError(Problem(str(path), fact, help="compile the model.py itself"))
    for node, own in node_paths(model).items():
        if CALLS in node.meta:  # of what was inside of a function the file tells no module
            node.name = own
    trained = frozenset(trainable_names(model)) if declares_trainable(model) else None
    write_declared(model, source.declared, trained)
    save_unsharded(model, path, "-o")
