"""Records in the shape of Criteo's, made from a seed: of a feature few ids are frequent, most are rare.

Whether an ad was clicked is drawn by a hidden score, to which each id and each number contributes.
"""

import numpy as np
from model import NUMBERS, SIZES


class Clicks:
    def __init__(self, records: int, seed: int) -> None:
        hidden, random = np.random.default_rng(26), np.random.default_rng(seed)
        # The share of lookups below x grows as the fifth root of x: half of them are of 3 % of the ids.
        self.ids = (np.array(SIZES) * random.random((records, len(SIZES))) ** 5).astype(np.int64)
        self.numbers = random.standard_normal((records, NUMBERS)).astype(np.float32)
        worth = [hidden.standard_normal(size) for size in SIZES]
        score = sum(worth[k][self.ids[:, k]] for k in range(len(SIZES))) / 3 + self.numbers @ np.full(NUMBERS, 0.2) - 1
        self.clicked = (random.random(records) < 1 / (1 + np.exp(-score))).astype(np.float32)[:, None]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"ids": self.ids[indices], "numbers": self.numbers[indices], "clicked": self.clicked[indices]}


def source() -> Clicks:
    return Clicks(8192, seed=1)
