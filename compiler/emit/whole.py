"""A whole model as a file that takes its place at once: small weights inside, large ones beside it in `.data`."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
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
