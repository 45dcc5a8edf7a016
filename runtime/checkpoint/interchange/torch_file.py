"""Reads and writes a file of `torch.save` as training scripts use it: the weights, the optimizer's state and the number of steps.

    torch.save(model.state_dict(), "weights.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 300}, "half.pt")

Only tensors and plain data are read (`weights_only`), so that no code in a file runs. Tensors are mapped.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.files.regular import fault
from partc.runtime.files.replace import replacing

from ...errors import CheckpointError, UsageError, out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

_MODEL = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim")
_STEP = ("step", "global_step")
_WRAPPERS = ("module.", "_orig_mod.")
"""The prefixes that DistributedDataParallel and torch.compile add to every name."""


@dataclass(frozen=True)
class TorchFile:
    """The content of a file, the weights by name in the model's order, and the optimizer's state if there is one.

    The keys locate the weights, the optimizer's state and the number of steps in `content`. Without `model_key` all of `content` is the
    weights; without one of the others the file lacks that item. `prefix` is the one that a wrapper of the model added to the names.
    """

    path: Path
    content: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any] | None = None
    step: int | None = None
    model_key: str = ""
    optimizer_key: str = ""
    step_key: str = ""
    prefix: str = ""

    def tied(self) -> dict[str, str]:
        """Maps each weight to the first weight that shares its storage; among tied weights an optimizer lists that first one."""
        seen: dict[tuple[object, ...], str] = {}
        found = {}
        for name, one in self.weights.items():
            lies = (one.untyped_storage().data_ptr(), one.storage_offset(), tuple(one.shape), one.stride())
            found[name] = seen.setdefault(lies, name) if one.numel() else name
        return found

    def replaced(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None, step: int) -> dict[str, Any]:
        """Returns the content with these weights in place of those with the same names, and with another optimizer state and step."""
        named = {f"{self.prefix}{name}": one for name, one in weights.items()}
        if not self.model_key:
            return {**self.content, **named}
        changed = {**self.content, self.model_key: {**self.content[self.model_key], **named}}
        if optimizer is not None:
            changed[self.optimizer_key] = optimizer
        if self.step_key:
            changed[self.step_key] = step
        return changed


def read_torch(path: Path) -> TorchFile:
    """Reads a file; CheckpointError where torch did not write it, where it needs code to be read, or where it has no weights."""
    torch = torch_module()
    if why := fault(path):
        raise UsageError(f"{path}: {why}\n  help: give a file that torch.save wrote")
    try:
        # before 1.6 torch wrote pickles one after the other, which cannot be mapped
        mapped = zipfile.is_zipfile(path)
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        if out_of_memory(error):
            raise
        if not isinstance(error, UnpicklingError | RuntimeError | EOFError):
            raise CheckpointError(f"{path}: is not a file that torch.save wrote\n  help: copy it again") from None
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if "Unsupported" in line), next(iter(lines), type(error).__name__))
        raise CheckpointError(
            f"{path}: cannot be read without running code: {reason}\n"
            '  help: save plain data: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)'
        ) from None
    return parsed(path, content)


def parsed(path: Path, content: object) -> TorchFile:
    """Finds the weights, the optimizer's state and the step in nested data; CheckpointError where it has no weights."""
    held: Mapping[str, Any] = content if isinstance(content, Mapping) else {}

    def weights_in(found: object) -> dict[str, Tensor]:
        tensor = torch_module().Tensor
        return (
            {str(name): one for name, one in found.items() if isinstance(one, tensor)}
            if isinstance(found, Mapping)
            else {}
        )

    model_key = next((key for key in _MODEL if weights_in(held.get(key))), "")
    weights = weights_in(held[model_key] if model_key else held)
    if not weights:
        keys = ", ".join(map(repr, [*held][:8])) or f"a {type(content).__name__}"
        raise CheckpointError(
            f"{path}: holds no weights: {keys}\n  help: save model.state_dict(), alone or under the key 'model'"
        )
    beside = held if model_key else {}
    optimizer_key = next((key for key in _OPTIMIZER if isinstance(beside.get(key), Mapping)), "")
    step_key = next((key for key in _STEP if isinstance(beside.get(key), int)), "")
    optimizer = beside.get(optimizer_key)
    if optimizer is not None:  # torch numbers the parameters; other formats have converted the numbers to texts
        state = {int(key) if str(key).isdecimal() else key: one for key, one in optimizer.get("state", {}).items()}
        optimizer = {**optimizer, "state": state}
    prefix = next((one for one in _WRAPPERS if all(name.startswith(one) for name in weights)), "")
    return TorchFile(
        path,
        held,
        {name.removeprefix(prefix): one for name, one in weights.items()},
        optimizer,
        beside.get(step_key),
        model_key,
        optimizer_key,
        step_key,
        prefix,
    )


def write_torch(path: Path, content: object) -> None:
    """Writes a file with `torch.save`; it appears only when it is complete."""
    torch = torch_module()
    with replacing(path) as out:
        torch.save(content, out)


def numpy_of(tensor: Tensor) -> Array:
    """Returns a tensor as a numpy array, without a copy where possible; bfloat16 and float8 types become those of ml_dtypes."""
    import ml_dtypes

    torch = torch_module()
    narrow = {
        torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
        torch.float8_e4m3fn: (torch.int8, ml_dtypes.float8_e4m3fn),
        torch.float8_e5m2: (torch.int8, ml_dtypes.float8_e5m2),
    }
    own = tensor.detach().cpu().contiguous()
    if own.dtype in narrow:
        bits, dtype = narrow[own.dtype]
        found: Array = own.view(bits).numpy().view(dtype)
        return found
    plain: Array = own.numpy()
    return plain


def torch_of(array: Array) -> Tensor:
    """Returns an array as a tensor of torch."""
    torch, narrow_type = torch_module(), None
    narrow = {"bfloat16": (torch.bfloat16, "int16"), "float8_e4m3fn": (torch.float8_e4m3fn, "int8")}
    narrow["float8_e5m2"] = (torch.float8_e5m2, "int8")
    if array.dtype.name in narrow:
        dtype, bits = narrow[array.dtype.name]
        array, narrow_type = array.view(bits), dtype
    found: Tensor = torch.from_numpy(array)
    if narrow_type is None:
        return found
    narrowed: Tensor = found.view(narrow_type)
    return narrowed


def torch_module() -> Any:
    """Returns the module torch; UsageError where it is not installed."""
    try:
        import torch
    except ImportError:
        raise UsageError('files of PyTorch need torch\n  help: pip install "partc[torch]"') from None
    return torch
