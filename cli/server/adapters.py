"""The requests that load and unload adapters while the server runs, under vLLM's paths: their bodies, and the checks of an adapter's
folder.

    POST /v1/load_lora_adapter      {"lora_name": "letters", "lora_path": "letters"}
    POST /v1/unload_lora_adapter    {"lora_name": "letters"}

The server checks the folder; the ranks read its weights (`runtime/generation/adapters.py`). Clients can name only folders inside the folder
of `--adapters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

from partc.cli.server.body_fields import Strict
from partc.cli.server.refusals import RefusedError
from partc.runtime.generation.adapters import AdapterChange
from pydantic import Field

Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]+$")]


class UnloadBody(Strict):
    """The adapter that leaves."""

    lora_name: Name


class LoadBody(UnloadBody):
    """The adapter that joins, and its folder."""

    lora_path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


def loaded(body: LoadBody, folder: str | None, stacks: Mapping[str, tuple[int, int, int]]) -> AdapterChange:
    """Returns the change that the ranks are sent.

    `folder`: the argument of `--adapters`. `stacks`: maps each module with room for adapters to its inputs, its outputs and the largest
    rank. Raises RefusedError with the faults of the folder, or if the artifact has no room for adapters or `--adapters` is not set.
    """
    from partc.compiler.errors import CompileError
    from partc.compiler.frontend.huggingface.adapter_folder import ADAPTER_WEIGHTS, read_adapter

    if not stacks:
        fact = "the artifact has no room for adapters; compile it with `generate: {adapters: 8, adapter_rank: 16}`"
        raise RefusedError(400, fact, "lora_name", "unsupported")
    if folder is None:
        raise RefusedError(
            403, "the server loads no adapters; start it with --adapters FOLDER", "lora_path", "adapters"
        )
    inside = Path(folder).resolve()
    path = (inside / body.lora_path).resolve()
    if not path.is_relative_to(inside):
        raise RefusedError(403, "the path is not inside of the folder of --adapters", "lora_path", "adapters")
    try:
        read = read_adapter(path, body.lora_path)
    except CompileError as error:
        raise RefusedError(400, " ".join(str(error).replace(str(inside), "").split()), "lora_path") from None
    problems = [f"the adapter replaces '{name}', which all requests share" for name in read.replaced]
    for module, added in read.products.items():
        problems += _misfits(module, (*added.sizes, added.rank), stacks)
    if problems:
        more = f"; and {len(problems) - 4} more" if problems[4:] else ""
        raise RefusedError(400, "; ".join(problems[:4]) + more, "lora_path")
    scales = {module: added.scale for module, added in read.products.items()}
    return AdapterChange(body.lora_name, str(path / ADAPTER_WEIGHTS), scales)


def _misfits(module: str, sizes: tuple[int, ...], stacks: Mapping[str, tuple[int, int, int]]) -> Iterator[str]:
    """Yields the reason for which an adapter of a module does not fit the model."""
    if module not in stacks:
        yield f"the model has no product '{module}' with room for adapters"
    elif sizes[:2] != stacks[module][:2]:
        yield f"'{module}' is {[*stacks[module][:2]]}, and the adapter adds {[*sizes[:2]]}; it is of another model"
    elif sizes[2] > (most := stacks[module][2]):
        yield f"'{module}' has rank {sizes[2]}, and there is room for {most}; compile with `adapter_rank: {sizes[2]}`"
