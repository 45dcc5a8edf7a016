"""Every file is opened by the readers of `runtime/files/` or a writer beside them: the source has no other call that opens one.

A call that is given an open stream (`np.load(file)`, `zipfile.ZipFile(out)`) opens nothing: its first argument is a name that a reader or
a writer has bound in the function, or a parameter that is annotated as a stream.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READERS = {"open_regular", "read_regular", "read_json", "read_text", "read_model", "text_of_system"}
WRITERS = {"new_file", "new_raw_file", "write_new", "open_to_change", "open_to_append", "replacing", "write_text"}
OWN = "runtime/files/"
"""The readers and writers themselves."""

METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "touch", "hardlink_to", "symlink_to"}
"""Of a path; `open` is one, too, where it is no method of an object of partc's."""
NUMPY = {
    "load",
    "loadtxt",
    "genfromtxt",
    "fromfile",
    "memmap",
    "save",
    "savez",
    "savez_compressed",
    "savetxt",
    "tofile",
}
CALLS = {
    "np": NUMPY,
    "numpy": NUMPY,
    "np.lib.format": {"open_memmap"},
    "mmap": {"mmap"},
    "os": {"open", "fdopen", "mkfifo", "mknod", "link", "symlink", "popen"},
    "io": {"open", "FileIO", "open_code"},
    "codecs": {"open"},
    "gzip": {"open", "GzipFile"},
    "bz2": {"open", "BZ2File"},
    "lzma": {"open", "LZMAFile"},
    "zipfile": {"ZipFile", "PyZipFile"},
    "tarfile": {"open", "TarFile"},
    "json": {"load", "dump"},
    "shutil": {"copy", "copy2", "copyfile", "copytree", "copyfileobj", "unpack_archive"},
    "tempfile": {"NamedTemporaryFile", "TemporaryFile", "mkstemp", "SpooledTemporaryFile"},
    "onnx": {"load", "load_model", "load_tensor", "save", "save_model", "save_tensor", "load_external_data_for_model"},
    "ir": {"load", "save"},
    "onnx_ir": {"load", "save"},
    "onnxruntime": {"InferenceSession"},
    "torch": {"load", "save"},
    "safetensors": {"safe_open"},
    "runpy": {"run_path"},
    "linecache": {"getline", "getlines"},
    "sqlite3": {"connect"},
}
"""By module what opens files that it is told the names of."""
NAMES = {"open", "safe_open", "load_file", "save_file", "GzipFile", "ZipFile", "memmap", "InferenceSession"}
WORDS = {"open", *METHODS, *NAMES, *(name for names in CALLS.values() for name in names)}
MAY_OPEN = re.compile(rf"\b({'|'.join(WORDS)})\(|\bfrom ({'|'.join(map(re.escape, CALLS))}) import\b")
"""What a source has that opens a file; others need not be parsed."""
STREAMS = {"IO", "BinaryIO", "TextIO", "FileIO", "BufferedReader", "BufferedRandom", "ZipFile"}

OTHERWISE = {
    "cli/comparison/reference.py: onnx.load": "verify reads what it has just compiled into a folder of its own, with its weights",
    "cli/comparison/variant.py: shutil.copytree": "verify copies what it has just compiled into a folder of its own",
    "cli/comparison/verdict.py: ir.save": "a new folder that verify has made",
    "cli/comparison/verdict.py: onnx.load": "the model that `load` has read, or that verify has written",
    "cli/interruption.py: open": "/dev/null or a standard stream",
    "cli/interruption.py: os.open": "/dev/null or a standard stream",
    "cli/output/failures.py: open": "a file of /proc",
    "runtime/job/place.py: Path(f'/proc/{pid}/stat').read_text": "a file of /proc",
    "cli/launch/guard.py: open": "it imports nothing of partc, since it starts with every job, and reads /proc",
    "cli/job/folders.py: os.open": "the lock in a folder that the job has made",
    "cli/machine/measure.py: (folder / 'plan.yaml').write_text": "a new folder that measure has made",
    "cli/machine/measure.py: (folder / REQUEST).write_text": "a new folder that measure has made",
    "cli/machine/measure.py: onnx.save": "a new folder that measure has made",
    "cli/machine/ranks.py: (folder / REQUEST).read_text": "the folder that measure has made for its ranks",
    "cli/machine/trial_rank.py: (folder / REQUEST).read_text": "the folder that the search has made for its ranks",
    "cli/machine/trials.py: (folder / REQUEST).write_text": "a new folder that the search has made",
    "cli/main.py: os.open": "/dev/null",
    "cli/output/console.py: open": "/dev/null",
    "compiler/emit/whole.py: ir.save": "the new folder of `replacing_together`",
    "runtime/checkpoint/lock.py: os.open": "the lock of a folder of checkpoints, and no link to one",
    "runtime/checkpoint/interchange/torch_file.py: torch.load": "a regular file, which torch maps by its name alone",
    "runtime/checkpoint/interchange/torch_file.py: torch.save": "the stream of `replacing`",
    "runtime/checkpoint/save.py: os.open": "a folder that is flushed",
    "runtime/communication/host/segment.py: mmap.mmap": "memory that a rank of the host has made",
    "runtime/communication/host/segment.py: open": "memory that a rank of the host has made, by its link in /proc",
    "runtime/job/parking.py: os.open": "a file of /proc, read again and again",
    "runtime/job/status_board.py: mmap.mmap": "the stream of `open_to_change`",
    "runtime/artifact/tensors/safetensors_stream.py: mmap.mmap": "the stream of `open_regular`",
    "runtime/program/ort.py: onnxruntime.InferenceSession": "a model in memory",
    "compiler/frontend/user_code.py: linecache.getline": "a line of a traceback, of a file that Python has run",
    "runtime/user_code.py: linecache.getline": "a line of a traceback, of a file that Python has run",
}
"""Calls that open a file otherwise, and why each may."""


def sources() -> dict[str, str]:
    found = [path for folder in ("compiler", "runtime", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found}


def calls_that_open(text: str) -> Iterator[str]:
    """The calls of a source that open a file by its name."""
    if not MAY_OPEN.search(text):
        return
    nodes = [*ast.walk(ast.parse(text))]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    aliases = {
        (alias.asname or alias.name): f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    words = WORDS | {name for name, imported in aliases.items() if imported.rpartition(".")[0] in CALLS}
    for node in [node for node in nodes if isinstance(node, ast.Call) and _last(node.func) in words]:
        called = ast.unparse(node.func)
        module, _, name = called.rpartition(".")
        imported = aliases.get(called, "")
        if imported.rpartition(".")[0] in CALLS:
            module, _, name = imported.rpartition(".")
        opens = (
            (module in CALLS and name in CALLS[module])
            or (isinstance(node.func, ast.Attribute) and name in METHODS and module not in ("regular", "counted"))
            or (isinstance(node.func, ast.Attribute) and name == "open" and _is_path(node, module))
            or (called in NAMES - own and not imported.startswith(("partc.", "files.")))
        )
        if opens and not _takes_stream(node, _innermost(node, nodes)):
            yield called


def _last(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _innermost(call: ast.Call, nodes: Sequence[ast.AST]) -> ast.AST:
    """The function around a call, or the module."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return next((one for one in reversed(functions) if any(inner is call for inner in ast.walk(one))), nodes[0])


def _is_path(call: ast.Call, owner: str) -> bool:
    """Whether `owner.open(...)` is that of a path: it has a mode, or its owner is an expression of a path."""
    modes = [one.value for one in call.args[:1] if isinstance(one, ast.Constant)]
    mode = any(isinstance(one, str) and set(one) <= set("rwaxbt+") for one in modes)
    return mode or any(word in owner for word in ("Path(", " / ", "path", "folder", "file"))


def _takes_stream(call: ast.Call, function: ast.AST) -> bool:
    """Whether the first argument is an open stream, as it is or in `cast(Any, stream)`."""
    given = next((one.value for one in call.keywords if one.arg == "fileobj"), call.args[0] if call.args else None)
    while isinstance(given, ast.Call) and ast.unparse(given.func) in ("cast", "io.BytesIO", "BytesIO"):
        if ast.unparse(given.func) != "cast":
            return True
        given = given.args[1]
    if isinstance(given, ast.Name):
        return given.id in set(_streams(function))
    return False


def _streams(function: ast.AST) -> Iterator[str]:
    """The names of a function that are open streams."""
    for node in ast.walk(function):
        if isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            maker = node.context_expr
            if isinstance(maker, ast.Call) and ast.unparse(maker.func).rpartition(".")[2] in READERS | WRITERS:
                yield node.optional_vars.id
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield from [node.arg] if ast.unparse(node.annotation).partition("[")[0] in STREAMS else []


def test_every_file_is_opened_by_the_readers_or_a_writer() -> None:
    found = {
        f"{file}: {call}"
        for file, text in sources().items()
        if not file.startswith(OWN)
        for call in calls_that_open(text)
    }
    assert sorted(found - OTHERWISE.keys()) == [], "open it by runtime/files/regular.py, counted.py or writers.py"
    assert sorted(OTHERWISE.keys() - found) == [], "these are no more"


PLANTED = [
    "def f(path):\n    return open(path).read()",
    "def f(path):\n    return path.read_text()",
    "def f(path):\n    return (path / 'x').read_bytes()",
    "def f(path):\n    path.write_text('x')",
    "def f(path):\n    with path.open('rb') as file:\n        return file.read()",
    "import numpy as np\ndef f(path):\n    return np.load(path)",
    "import numpy as np\ndef f(path, x):\n    np.savez(path, x=x)",
    "from numpy import memmap\ndef f(path):\n    return memmap(path)",
    "import mmap\ndef f(handle):\n    return mmap.mmap(handle, 0)",
    "import onnx\ndef f(path):\n    return onnx.load(path, load_external_data=False)",
    "import onnx_ir as ir\ndef f(path):\n    return ir.load(path)",
    "from safetensors import safe_open\ndef f(path):\n    return safe_open(path, 'numpy')",
    "import os\ndef f(path):\n    return os.open(path, os.O_RDONLY)",
    "import zipfile\ndef f(path):\n    return zipfile.ZipFile(path)",
    "import gzip\ndef f(path):\n    return gzip.open(path)",
    "import json\ndef f(path):\n    return json.load(open(path))",
    "import shutil\ndef f(one, other):\n    shutil.copyfile(one, other)",
    "from os import open as begin\ndef f(path):\n    return begin(path, 0)",
    "import numpy as np\nfrom x import open_regular\ndef f(path):\n    with open_regular(path) as file:\n        return np.load(path)",
]


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_call_is_found(text: str) -> None:
    assert list(calls_that_open(text))


SOUND = [
    "import numpy as np\nfrom x import open_regular\ndef f(path):\n    with open_regular(path) as file:\n        return np.load(file)",
    "import zipfile\nfrom x import new_file\ndef f(path):\n    with new_file(path) as out:\n        return zipfile.ZipFile(out, 'w')",
    "import numpy as np\nfrom typing import IO, Any, cast\ndef f(file: IO[bytes]):\n    return np.memmap(cast(Any, file), 'u1', 'r')",
    "from x import Checkpoint\ndef f(name):\n    return Checkpoint.open(name)",
]


@pytest.mark.parametrize("text", SOUND)
def test_what_takes_an_open_stream_opens_nothing(text: str) -> None:
    assert not list(calls_that_open(text))


def test_memory_that_runs_out_is_not_a_fault_of_a_file() -> None:
    """What an OSError says becomes a text by `reason_of` alone, which raises it again where memory ran out."""
    kept = {
        "reasons of what is left out": {
            "cli/doctor/machine.py",
            "runtime/communication/mpi.py",
            "runtime/training/copies.py",
        }
    }
    kept["raised again, or printed last"] = {
        "runtime/errors.py",
        "cli/output/failures.py",
        "runtime/artifact/tensors/safetensors_stream.py",
    }
    kept["collected from all ranks"] = {"runtime/generation/generator.py", "runtime/checkpoint/save.py"}
    kept["a cache that is not kept"] = {"compiler/frontend/huggingface/export_cache.py"}
    found = set[str]()
    for folder in ("cli", "compiler", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.ExceptHandler) or node.name is None or node.type is None:
                    continue
                caught = {one.id for one in ast.walk(node.type) if isinstance(one, ast.Name)}
                if "OSError" in caught and any(_is_text_of(one, node.name) for one in ast.walk(node)):
                    found.add(path.relative_to(ROOT).as_posix())
    assert found <= set[str]().union(*kept.values())


def _is_text_of(node: ast.AST, name: str) -> bool:
    """Whether an expression is the text of an error: `f"{error}"`, `str(error)` or `error.strerror`."""
    match node:
        case ast.FormattedValue(value=ast.Name(id=one)) | ast.Attribute(value=ast.Name(id=one), attr="strerror"):
            return one == name
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=one)]):
            return one == name
    return False
