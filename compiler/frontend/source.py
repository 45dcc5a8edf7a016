"""The result of a loader: the model as an onnx-ir graph and the model's own declarations of placement and symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from partc.compiler.ir.declared import Declared

if TYPE_CHECKING:
    import onnx_ir as ir


Known: TypeAlias = "Callable[[Sequence[str]], None]"
"""A callback that checks the names of a module's tensors as soon as they are known; it raises CompileError."""


Weights: TypeAlias = "bool | Path"
"""Where a folder's weights are read from: True the folder itself, False nowhere, a path another folder."""


def nothing(names: Sequence[str]) -> None:
    """Accepts all names: the `Known` that checks nothing."""


@dataclass(frozen=True)
class Source:
    """A loaded model: one main graph without function calls, and the declarations in its `model.py`.

    `exported`: whether torch exported it, which takes seconds to minutes. `is_export_cached`: whether that export is stored for the next
    command. `quantized`, `adapted`: whether the plan's `quantize` and `adapters` have been applied. `absent`: whether the weights are only
    names, types and shapes.
    """

    model: ir.Model
    declared: Declared = field(default_factory=Declared)
    exported: bool = False
    is_export_cached: bool = False
    quantized: bool = False
    adapted: bool = False
    absent: bool = False


def compared(source: Source) -> Source:
    """Compares a model that torch exported with its module, and adds the warnings. Raises CompileError where they differ."""
    from partc.compiler.frontend.torch.compare_with_torch import compare_with_torch

    warnings = (*source.declared.warnings, *compare_with_torch(source.model))
    return replace(source, declared=replace(source.declared, warnings=warnings))
