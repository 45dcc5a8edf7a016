"""The four records whose microbatches follow each other through the two halves."""

import numpy as np

RECORDS = np.array([[1.6], [0.4], [-0.8], [2.8]], np.float32)


class Numbers:
    def __len__(self) -> int:
        return len(RECORDS)

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": RECORDS[indices]}


source = Numbers
