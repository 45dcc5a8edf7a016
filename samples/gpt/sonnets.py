"""Records of text: from `sonnets.txt`, 14 sonnets by W. Shakespeare (1609), in modern spelling, every two lines that follow each other.

A token is a byte. The label of each is the byte that comes next, so records are as long as their lines are: what fills up a
batch's shorter ones, and which lengths come together, the plan says.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

TEXT = Path(__file__).with_name("sonnets.txt")


class Couplets:
    def __init__(self) -> None:
        poems = (poem.splitlines() for poem in TEXT.read_text().split("\n\n"))
        pairs = [f"{first}\n{second}\n" for poem in poems for first, second in pairwise(poem)]
        self.pairs = [np.frombuffer(pair.encode(), np.uint8) for pair in pairs]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, indices: np.ndarray) -> dict[str, list[np.ndarray]]:
        chosen = [self.pairs[index].astype(np.int64) for index in indices]
        return {"ids": [pair[:-1] for pair in chosen], "labels": [pair[1:] for pair in chosen]}


source = Couplets
