"""The artifact's format: names of communication ops and their attributes, metadata keys, and the manifest's schema.

This is the one contract between compiler and runtime; `runtime/README.md` explains it to people. A rank file is a standard
ONNX model: nodes of the standard domains plus nodes of `partc.comm`, in the order in which the rank executes and
communicates. `Send(X) ->` and `-> Recv(Y)` of one transfer carry the same `tag`.

Types are written as onnxruntime writes them: `tensor(float)`, `seq(tensor(float))`, `optional(tensor(int64))`.
A dim is an integer or an expression over the dims named in `Manifest.symbols` (`batch`, `floor(seq/2) + 1`); None where the shape
is known only when the step runs.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

FORMAT = 1
DOMAIN = "partc.comm"
DOMAIN_VERSION = 1

SEND = "Send"
RECV = "Recv"
PEER = "peer"
TAG = "tag"

# metadata_props keys of nodes in a rank file
PATH = "partc.path"
RULE = "partc.rule"
CAUSE = "partc.cause"
BYTES = "partc.bytes"

MANIFEST = "manifest.json"
WEIGHTS = "weights"
BEGIN_IR = "ir/step_parallel_begin.ir"
END_IR = "ir/step_parallel_end.ir"


def rank_file(rank: int) -> str:
    """The file name of a rank's program."""
    return f"rank_{rank:04d}.onnx"


def weights_file(rank: int) -> str:
    """The file that holds the weights whose lowest using rank is `rank`."""
    return f"{WEIGHTS}/rank_{rank:04d}.safetensors"


def stays_inside(path: str) -> bool:
    """Whether a relative path names something inside its folder, on any operating system."""
    parts = PurePosixPath(path.replace("\\", "/"))
    return bool(path) and not parts.is_absolute() and ".." not in parts.parts and ":" not in path


def _inside(path: str) -> str:
    if not stays_inside(path):
        raise ValueError(f"the path '{path}' leaves the folder")
    return path


Dim: TypeAlias = int | str
Shape: TypeAlias = list[Dim] | None


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SymbolRecord(_Record):
    """A dynamic dim: `divisor*N + remainder`, N >= 1 where `divisor > 1`, within [min, max]; max None: no bound."""

    min: int = Field(0, ge=0)
    max: int | None = None
    divisor: int = Field(1, ge=1)
    remainder: int = Field(0, ge=0)


class Port(_Record):
    """A model input with the ranks that read it, or a model output with the ranks that it is delivered to."""

    name: str
    type: str
    shape: Shape
    ranks: list[int]


class Transfer(_Record):
    """One message: `value` from rank `source` to rank `target`; `bytes` is an expression, 'unknown' where the shape is."""

    tag: int
    value: str
    source: int
    target: int
    type: str
    shape: Shape
    bytes: str
    cause: str


class FileRecord(_Record):
    """What a file of the artifact must be."""

    bytes: int
    sha256: str


class SourceRecord(_Record):
    """A file that the artifact was compiled from: its name without folder, and its hash."""

    name: str
    sha256: str


class Manifest(_Record):
    """The index of an artifact."""

    format: Literal[1]
    partc: str
    ranks: int = Field(ge=1)
    symbols: dict[str, SymbolRecord]
    inputs: list[Port]
    outputs: list[Port]
    transfers: list[Transfer]
    files: dict[Annotated[str, AfterValidator(_inside)], FileRecord]
    model: SourceRecord
    plan: SourceRecord | None
