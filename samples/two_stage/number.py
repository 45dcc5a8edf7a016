"""The one record that the two halves are trained on."""

import numpy as np

RECORDS = np.array([[1.6]], np.float32)


class Number:
    def __len__(self) -> int:
        return len(RECORDS)

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": RECORDS[indices]}


source = Number
