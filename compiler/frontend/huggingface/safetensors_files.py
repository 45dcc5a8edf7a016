"""Lists the tensors in a folder's `*.safetensors` by name: `model.safetensors`, or the files that `model.safetensors.index.json` names.

Only headers are read. A file may be a link, as in Hugging Face's cache, whose folders link to files named by their hash: a tensor's offset
refers to the file that the link leads to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partc.compiler.errors import CompileError, Problem
from partc.runtime.artifact.tensors.safetensors_stream import Stored, read_header
from partc.runtime.errors import reason_of
from partc.runtime.files.regular import fault, read_regular
from partc.runtime.spellings import nearest

if TYPE_CHECKING:
    import onnx_ir as ir

CONFIG = "config.json"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_LARGEST_JSON = 100_000_000
_AGAIN = "copy the file again, or save the model again with save_pretrained"


@dataclass(frozen=True)
class InFile:
    """A tensor in a file; the path is resolved and not a link."""

    file: Path
    stored: Stored


@dataclass(frozen=True)
class InFiles(InFile):
    """A weight computed from several tensors. `tensor` makes it in an element type, with a name; `file` has one of the tensors."""

    tensor: Callable[[ir.DataType, str], ir.TensorProtocol]


def read_object(path: Path, where: str) -> dict[str, object]:
    """Reads the JSON object in a file. Raises CompileError where the file has none."""
    try:
        content = json.loads(read_regular(path, _LARGEST_JSON))
    except FileNotFoundError:
        raise CompileError(Problem(where, "no such file")) from None
    except OSError as error:
        raise CompileError(Problem(where, reason_of(error))) from None
    except (ValueError, RecursionError) as error:
        raise CompileError(Problem(where, f"is not JSON: {error}", help=_AGAIN)) from None
    if not isinstance(content, dict):
        raise CompileError(Problem(where, "holds no JSON object", help=_AGAIN))
    return content


def has_weights(folder: Path) -> bool:
    """Whether a folder has files of weights, or their index."""
    return (folder / WEIGHTS).exists() or (folder / INDEX).exists()


def stored_tensors(folder: Path) -> dict[str, InFile]:
    """Maps each name to its tensor. Raises CompileError with all problems of the files and their index."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return _of_one_file(folder)
    where = f"{folder.name}/{INDEX}"
    index = read_object(folder / INDEX, where).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CompileError(Problem(where, "'weight_map' is not a mapping of tensors to files", help=_AGAIN))
    problems: list[Problem] = []
    files: dict[str, Mapping[str, InFile]] = {}
    for file in dict.fromkeys(index.values()):
        names = [name for name, one in index.items() if one == file]
        title = f"'{names[0]}'{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        if Path(file).name != file:
            fact = f"{title} is in '{file}', which is not in the folder"
            problems.append(Problem(where, fact, help=_AGAIN))
        elif not (folder / file).exists():
            there = sorted(path.name for path in folder.glob("*.safetensors"))[:4]
            help_ = f"the folder has {', '.join(there)}" if there else _AGAIN
            problems.append(Problem(where, f"{title} is in '{file}', which is missing", help=help_))
        else:
            try:
                files[file] = tensors_of(folder / file, f"{folder.name}/{file}")
            except CompileError as error:
                problems += error.problems
    for name, file in index.items():
        if file in files and name not in files[file]:
            fact = f"'{name}' is in '{file}', which has no such tensor"
            elsewhere = [other for other, tensors in files.items() if name in tensors]
            like = nearest(name, files[file])
            said = f"it is in {', '.join(elsewhere)}" if elsewhere else f"the nearest names are {', '.join(like)}"
            problems.append(Problem(where, fact, help=said if elsewhere or like else _AGAIN))
    if problems:
        raise CompileError(problems)
    return {name: files[file][name] for name, file in index.items()}


def _of_one_file(folder: Path) -> dict[str, InFile]:
    if (folder / WEIGHTS).exists():
        return tensors_of(folder / WEIGHTS, f"{folder.name}/{WEIGHTS}")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".safetensors", ".gguf"))
    fact = f"the folder has neither {WEIGHTS} nor {INDEX}" + (f"; it has {', '.join(others[:4])}" if others else "")
    help_ = "save the model with save_pretrained, which writes safetensors; `partc compile` takes --no-weights, and --weights FOLDER"
    raise CompileError(Problem(folder.name, fact, help=help_))


def tensors_of(path: Path, where: str) -> dict[str, InFile]:
    file = path.resolve()
    if why := fault(file):
        raise CompileError(Problem(where, why, help=_AGAIN))
    try:
        return {name: InFile(file, stored) for name, stored in read_header(file).items()}
    except OSError as error:
        raise CompileError(Problem(where, reason_of(error))) from None
    except ValueError as error:
        raise CompileError(Problem(where, f"is not a sound safetensors file: {error}", help=_AGAIN)) from None
