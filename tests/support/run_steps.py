"""The steps of a rank file's model: by the run list that the compiler would write, or by the one that the runtime makes without one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import ModelProto
from partc.compiler.emit.run_list import run_list
from partc.runtime.artifact.format import MANIFEST, run_list_file
from partc.runtime.artifact.tasks.calls import unrolled
from partc.runtime.program.default_list import default_list
from partc.runtime.program.listed_steps import listed_steps
from partc.runtime.program.steps import Step

ROW = "infer"


def steps_of(
    model: ModelProto, where: str = "rank.onnx", groups: Mapping[str, tuple[int, ...]] | None = None
) -> list[Step]:
    return listed_steps(model, run_list(model, ROW), ROW, where, groups)


def default_steps(
    model: ModelProto, where: str = "rank.onnx", groups: Mapping[str, tuple[int, ...]] | None = None
) -> list[Step]:
    flat = unrolled(model, where)
    return listed_steps(flat, default_list(flat, ROW, where), ROW, where, groups)


def decide_again(folder: Path) -> None:
    """Run lists, and their records in the manifest, of rank files that were changed; a file that has none such keeps what it has."""
    index = json.loads((folder / MANIFEST).read_text())
    main, guard = next(iter(index["programs"]), ""), (index.get("training") or {}).get("guard", "")
    for name in [name for name in index["files"] if name.endswith(".run.json")]:
        file = f"{name.removesuffix('.run.json')}.onnx"
        try:
            known, data = json.loads((folder / name).read_text()), (folder / file).read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            if known["program"] == digest:
                continue
            model, row = onnx.load_model_from_string(data), next(iter(known["rows"]))
            listed = run_list(model, row, guard if row == main else "", index["programs"][row].get("kept", ()))
        except Exception:
            continue
        text = listed.model_copy(update={"program": digest}).text().encode()
        (folder / name).write_bytes(text)
        index["files"][name] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(index))


def give_lists(folder: Path) -> Path:
    """Gives the rank files of an artifact written by hand the run lists that the compiler would write."""
    index = json.loads((folder / MANIFEST).read_text())
    row = next(iter(index["programs"]))
    for file in [name for name in index["files"] if name.endswith(".onnx")]:
        name, data = run_list_file(file), (folder / file).read_bytes()
        listed = run_list(onnx.load_model_from_string(data), row)
        text = listed.model_copy(update={"program": hashlib.sha256(data).hexdigest()}).text().encode()
        (folder / name).write_bytes(text)
        index["files"][name] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(index))
    return folder
