"""What `partc verify` compares, and its result: the rows of the comparison and lines that explain them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from partc.compiler.comparison.compare import Compared
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.units import first_of

if TYPE_CHECKING:
    import onnx_ir as ir
    from partc.cli.comparison.first_difference import Compiled
    from partc.cli.job.inputs import Value
    from partc.compiler.pipeline import Report


@dataclass(frozen=True)
class Case:
    """A model that was compiled, and the inputs on which it is compared."""

    model: Path
    plan: Path | None
    report: Report
    values: Mapping[str, Value]
    scratch: Path
    mpi: bool
    devices: Mapping[str, str] = field(default_factory=dict)
    """By target of the compiled model the device that it is asked to be."""

    def unsharded(self, model: ir.Model | None = None) -> Path:
        """A file of the unsharded model: the user's own where it is one, else of `model`, which is loaded anew where none is given."""
        if self.model.suffix == ".onnx":
            return self.model
        import onnx_ir as ir
        from partc.compiler.frontend import load
        from partc.compiler.rewrite.unrolled import unrolled

        path, whole = self.scratch / "whole.onnx", load(self.model).model if model is None else model
        ir.save(unrolled(whole, dict(self.report.program.plan.mesh)), path, external_data="whole.data")
        return path


@dataclass(frozen=True)
class Verdict:
    """The comparison, and lines that explain it."""

    rows: Sequence[Compared]
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether all is equal."""
        return all(row.passed for row in self.rows)


def measured(
    before: Sequence[Compared], after: Sequence[Compared], alone: Compiled, noise: Mapping[str, Array]
) -> list[str]:
    """A line that names the values which pass only because of the measured rounding."""
    from partc.cli.comparison.reference import DRAWS, is_quantized
    from partc.runtime.artifact.manifest import open_artifact

    pairs = zip(before, after, strict=True)
    moved = {new.name: float(noise[new.name].max()) for old, new in pairs if new.passed and not old.passed}
    if not moved:
        return []
    names = first_of([f"'{name}' by {most:.3g}" for name, most in moved.items()])
    text = f"rounding alone changes the unsharded model's {names}, in {DRAWS} runs with operands changed by units in the last place"
    if is_quantized(alone.folder, open_artifact(alone.folder, trust=True).manifest):
        text += "; it is quantized, and a value halfway between two steps is rounded either way"
    return [text]
