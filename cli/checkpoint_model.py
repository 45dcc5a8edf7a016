"""A model with the weights of a checkpoint: the forward model as it was before training, with what was learned.

Layers that behave otherwise in training take their inference form: a BatchNormalization takes its running statistics, a Dropout
lets all pass. Weights are read from the checkpoint when they are written: one at a time where they stand in a file of their own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from partc.runtime.training.checkpoint import Checkpoint
from partc.runtime.training.checkpoint_index import CheckpointError, TensorRecord

if TYPE_CHECKING:
    import onnx_ir as ir

_INLINE_BYTES = 256 * 1024 * 1024
"""Weights of more bytes stand in a file of their own; protobuf allows two gigabytes in all."""


def export_model(checkpoint: Checkpoint, model: Path, path: Path, inline_bytes: int = _INLINE_BYTES) -> int:
    """Writes the model with the checkpoint's parameters and statistics into `path`; how many of its weights were replaced.

    Large weights go beside it into `path` and `.data`. CheckpointError has all weights that do not fit, and tells where a file
    would be overwritten that is read.
    """
    from partc.compiler.load import load

    program = load(model).model
    replaced = _replace(program, checkpoint, model)
    _to_inference(program)
    _write(program, path, inline_bytes)
    return replaced


def _replace(program: ir.Model, checkpoint: Checkpoint, model: Path) -> int:
    import onnx_ir as ir
    from partc.compiler.plan.pattern import nearest

    weights = program.graph.initializers
    learned = {name: one for name, one in checkpoint.index.tensors.items() if one.kind != "optimizer"}
    problems = []
    for name, tensor in learned.items():
        value = weights.get(name)
        if value is None or value.const_value is None:
            like = ", ".join(f"'{near}'" for near in nearest(name, weights))
            problems.append(f"{model}: has no weight '{name}'" + (f"; the nearest are {like}" if like else ""))
            continue
        old = value.const_value
        if (have := f"{old.dtype.numpy().name} {list(old.shape.numpy())}") != (new := _text(tensor)):
            problems.append(f"{model}: '{name}' is {have}; in the checkpoint it is {new}")
    if problems:
        help = f"  help: give the model that was trained; {checkpoint.path} is of another"
        raise CheckpointError("\n".join([*problems, help]))
    for name in learned:
        value = weights[name]
        assert value.const_value is not None
        value.const_value = ir.LazyTensor(
            lambda name=name: ir.Tensor(checkpoint.read(name), name=name),  # type: ignore[misc]
            dtype=value.const_value.dtype,
            shape=value.const_value.shape,  # type: ignore[arg-type]
            name=name,
            cache=False,
        )
    return len(learned)


def _text(tensor: TensorRecord) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _to_inference(program: ir.Model) -> None:
    """Changes the layers that are in training mode; what they gave in training only is no output any more."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    changed = [node for node in program.graph if _changed(program.graph, node)]
    if changed:
        RemoveUnusedNodesPass()(program)


def _changed(graph: ir.Graph, node: ir.Node) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "BatchNormalization" and ("training_mode" in node.attributes or len(node.outputs) > 1):
        node.attributes.pop("training_mode", None)
        for output, state in zip(node.outputs[1:], node.inputs[3:], strict=False):
            for kept in [at for at, value in enumerate(graph.outputs) if value is output]:
                del graph.outputs[kept]
            assert state is not None
            output.replace_all_uses_with(state)
        node.resize_outputs(1)
        return True
    if node.op_type == "Dropout" and len(node.inputs) > 1:
        node.resize_inputs(1)
        return True
    return False


def _write(program: ir.Model, path: Path, inline_bytes: int) -> None:
    import onnx_ir as ir

    tensors = list(_tensors(program))
    large = sum(tensor.nbytes for tensor in tensors) > inline_bytes
    data = path.with_name(f"{path.name}.data")
    read = {Path(tensor.path).resolve() for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    for file in (path, *([data] if large else [])):
        if file.resolve() in read:
            raise CheckpointError(f"{file}: weights of the model are read from it\n  help: give another name with -o")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        if large:
            ir.save(program, made, external_data=data.name)
            os.replace(made.with_name(data.name), data)
        else:
            ir.external_data.load_to_model(program)
            ir.save(program, made)
        os.replace(made, path)


def _tensors(program: ir.Model) -> Iterator[ir.TensorProtocol]:
    for graph in program.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
