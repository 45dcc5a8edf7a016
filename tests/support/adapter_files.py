"""Folders of adapters as peft writes them, and what they add to the weights of their modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

F = np.float32


def write_adapter(
    folder: Path, sizes: Mapping[str, tuple[int, int]], ranks: Mapping[str, int], seed: int = 1, **settings: Any
) -> dict[str, np.ndarray]:
    """Writes an adapter of modules of so many inputs and outputs; by module scale * B A, [outputs, inputs], in float64."""
    rng = np.random.default_rng(seed)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "use_dora": False, **settings}
    files, more = {}, {}
    for name, rank in ranks.items():
        inputs, outputs = sizes[name]
        a, b = (rng.standard_normal(shape).astype(F) / 3 for shape in ((rank, inputs), (outputs, rank)))
        files |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        alpha = settings.get("alpha_pattern", {}).get(name.rpartition(".")[2], config["lora_alpha"])
        more[name] = alpha / (rank**0.5 if settings.get("use_rslora") else rank) * (b.astype(float) @ a)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(files, folder / "adapter_model.safetensors")
    return more
