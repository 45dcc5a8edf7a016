"""Layouts of the decoder of tests over ranks, and prompts that several tests continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from decoders import VOCABULARY
from partc.runtime import Request
from partc.runtime.generation.draw import Candidates

TENSOR = """sharding:
  "layers.*.[qkv]": colwise
  "layers.*.q": colwise
  "layers.*.k": colwise
  "layers.*.v": colwise
  "layers.*.o": rowwise
  "layers.*.up": colwise
  "layers.*.down": rowwise
  head: colwise
""".replace('  "layers.*.[qkv]": colwise\n', "")
STAGES = """placement:
  "embed.*": {first}
  "layers.0": {first}
  "layers.1": {second}
  head: {second}
"""
LAYOUTS = {
    "one rank": "ranks: 1\n",
    "tensor parallel": f"ranks: 2\nmesh: {{tp: 2}}\n{TENSOR}",
    "stages": "ranks: 2\n" + STAGES.format(first=0, second=1),
    "data parallel": "ranks: 2\ndataset: data_parallel\n",
    "tensor parallel stages": "ranks: 4\nmesh: {pp: 2, tp: 2}\n"
    + TENSOR
    + STAGES.format(first="{pp: 0}", second="{pp: 1}"),
}
REPLICAS = f"ranks: 4\nmesh: {{dp: 2, tp: 2}}\ndataset: {{ids: [dp, null]}}\n{TENSOR}"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [*range(1, 40)], [11, 12], [60, 2, 33, 4]]
COUNTS = [12, 20, 5, 9, 17]


def requests() -> list[Request]:
    return [Request(prompt, max_tokens=count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]


def recording(monkeypatch: pytest.MonkeyPatch, told: Callable[[Request, int, bytes], object]) -> None:
    """Lets draws take the likeliest token, and tells by request and number of the token the bits of its logits."""

    def likeliest(shards: Sequence[Candidates], request: Request, number: int, _: object) -> int:
        keys = np.concatenate([one.keys for one in shards])
        assert keys.size == VOCABULARY
        told(request, number, keys.tobytes())
        return 2**32 - 1 - int(keys.max()) % 2**32

    monkeypatch.setattr("partc.runtime.generation.sampling.draw", likeliest)
