"""Writes a model with the weights of a checkpoint, in inference form: BatchNormalization uses its running statistics, Dropout does nothing.

Weights are read from the checkpoint when they are written, one at a time where each has a file of its own.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from partc.compiler.emit.whole import INLINE_BYTES, save_unsharded
from partc.compiler.ir.graph import is_inside
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.index import TensorRecord
from partc.runtime.checkpoint.verification import Verification
from partc.runtime.errors import CheckpointError, DamagedError
from partc.runtime.spellings import nearest


def export_model(checkpoint: Checkpoint, model: Path, path: Path, inline_bytes: int = INLINE_BYTES) -> int:
    """Writes the model with the checkpoint's parameters and statistics to `path`; returns the number of weights that were replaced.

    Large weights go into a file next to it, named `path` with `.data` appended. Raises CheckpointError with all weights that do not fit,
    CompileError where a file that is read would be overwritten, and DamagedError for a damaged checkpoint.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass
    from partc.compiler.frontend import load
    from partc.compiler.rewrite.train_mode import to_evaluation
    from partc.compiler.training.shared import split_as

    with Verification(checkpoint) as proof:
        program = load(model).model
        if problems := proof.problems():
            raise DamagedError(problems)
    if any(is_inside(node) for node in program.graph):
        fact = f"{model}: it has local maps, which are defined only on the mesh of a plan"
        raise CheckpointError(f"{fact}\n  help: evaluate it with `partc eval`, on the artifact of the plan")
    split_as(program, checkpoint.index.tensors)
    replaced = _replace(program, checkpoint, model)
    to_evaluation(program)
    RemoveUnusedNodesPass()(program)
    save_unsharded(program, path, "-o", inline_bytes)
    return replaced


def _replace(program: ir.Model, checkpoint: Checkpoint, model: Path) -> int:
    import onnx_ir as ir

    weights = program.graph.initializers
    problems = []
    for name, tensor in _of_the_model(checkpoint).items():
        value = weights.get(name)
        if value is None or value.const_value is None:
            like = ", ".join(f"'{near}'" for near in nearest(name, weights))
            problems.append(f"{model}: has no weight '{name}'" + (f"; the nearest are {like}" if like else ""))
            continue
        old = value.const_value
        have, new = f"{old.dtype.numpy().name} {list(old.shape.numpy())}", f"{tensor.dtype} {list(tensor.shape)}"
        if have != new:
            problems.append(f"{model}: '{name}' is {have}; in the checkpoint it is {new}")
    if problems:
        help = f"  help: use the model that was trained; {checkpoint.path} is from another one"
        raise CheckpointError("\n".join([*problems, help]))
    for name in _of_the_model(checkpoint):
        value = weights[name]
        assert value.const_value is not None
        value.const_value = ir.LazyTensor(
            lambda name=name: ir.Tensor(checkpoint.read(name), name=name),  # type: ignore[misc]
            dtype=value.const_value.dtype,
            shape=value.const_value.shape,  # type: ignore[arg-type]
            name=name,
            cache=False,
        )
    return len(_of_the_model(checkpoint))


def _of_the_model(checkpoint: Checkpoint) -> dict[str, TensorRecord]:
    """Returns the records of the checkpoint's parameters and statistics, which belong to the model itself."""
    return {name: one for name, one in checkpoint.index.tensors.items() if one.kind in ("parameter", "statistics")}
