"""The comparison of `partc verify`: its cases, and its result as rows and lines that explain them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.compiler.comparison.compare import Compared
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.errors import PartcError
from partc.runtime.units import first_of

if TYPE_CHECKING:
    from partc.cli.comparison.first_difference import Compiled
    from partc.cli.job.inputs import Value
    from partc.compiler.frontend.source import Source
    from partc.compiler.frontend.torch.torch_model import TorchModel
    from partc.compiler.pipeline import Report


_INT8 = 4
"""The accuracy level of products that compute in int8."""


@dataclass(frozen=True)
class Case:
    """A compiled model, and the inputs of the comparison."""

    model: Path
    plan: Path | None
    report: Report
    values: Mapping[str, Value]
    scratch: Path
    mpi: bool
    source: Source
    """The model as it was loaded."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Maps each target of the compiled model to the device that is to stand for it."""
    torch_model: TorchModel | None = None
    """The module that the model is compared with."""

    def unsharded(self) -> Path:
        """Returns a file of the unsharded model: the user's own, if it is an ONNX file that is not quantized."""
        if self.model.suffix == ".onnx" and not self.source.quantized:
            return self.model
        import onnx_ir as ir
        from partc.compiler.rewrite.mixtures import with_dense_experts
        from partc.compiler.rewrite.unrolled import unrolled

        path, whole = self.scratch / "whole.onnx", with_dense_experts(self.source.model.clone())
        ir.save(unrolled(whole, dict(self.report.program.plan.mesh)), path, external_data="whole.data")
        return path

    def unrounded(self) -> Path | None:
        """Returns a file of the model without rounding of activations or caches to int8; None if the model has no such rounding."""
        import onnx_ir as ir
        from partc.compiler.rewrite.generation.rounding import rounding_of
        from partc.compiler.rewrite.mixtures import with_dense_experts

        whole = with_dense_experts(self.source.model.clone())
        products = [node for node in whole.graph if node.attributes.get_int("accuracy_level", 0) == _INT8]
        caches = [(node, rounded) for node in whole.graph if (rounded := rounding_of(node.outputs[0])) is not None]
        if not products and not caches:
            return None
        for node in products:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
        for node, rounded in caches:
            node.outputs[0].replace_all_uses_with(rounded.source)
        path = self.scratch / "unrounded.onnx"
        ir.save(whole, path, external_data="unrounded.data")
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


def unsharded_session(path: Path, optimized: bool = True) -> Any:
    """Returns an onnxruntime session of a file; without `optimized` no kernel replaces several nodes.

    Nodes of bfloat16, for which onnxruntime has no kernels on CPUs, compute in float32, as on ranks. Raises PartcError with the reason if
    onnxruntime refuses the file.
    """
    import onnx
    from partc.runtime.artifact.graph.half_kernels import compute_in_float32
    from partc.runtime.program.ort import quiet_session

    model = onnx.load(path, load_external_data=False)
    changed = compute_in_float32(model, bfloat16=True)
    source, folder = (model.SerializeToString(), str(path.parent.resolve())) if changed else (path, "")
    try:
        return quiet_session(source, folder, threads=0, optimized=optimized)
    except Exception as error:
        raise PartcError(f"{path}: onnxruntime cannot load the unsharded model: {error}") from error


def of_torch_named(rows: Sequence[Compared], of_torch: Collection[str]) -> list[Compared]:
    """Returns the rows, with the reference `torch` in those whose values were compared with torch."""
    return [replace(row, reference="torch") if row.name in of_torch else row for row in rows]


def measured(
    before: Sequence[Compared], after: Sequence[Compared], alone: Compiled, noise: Mapping[str, Array]
) -> list[str]:
    """Returns a line that names the values that pass only because of the measured rounding."""
    from partc.cli.comparison.reference import DRAWS, is_quantized
    from partc.runtime.artifact.manifest import open_artifact

    pairs = zip(before, after, strict=True)
    passed = [new.name for old, new in pairs if new.passed and not old.passed and new.name in noise]
    moved = {name: float(noise[name].max()) for name in passed}
    if not moved:
        return []
    names = first_of([f"'{name}' by {most:.3g}" for name, most in moved.items()])
    text = f"rounding alone changes the unsharded model's {names}, in {DRAWS} runs with operands changed by units in the last place"
    if is_quantized(alone.folder, open_artifact(alone.folder, trust=True).manifest):
        text += "; it is quantized, and a value halfway between two steps is rounded either way"
    return [text]
