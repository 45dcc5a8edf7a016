"""Records for a first run: the 320 digits that lie beside the LeNet, which come round again until they fill three batches of 800.

Data: MNIST by Y. LeCun, C. Cortes and C. Burges, CC BY-SA 3.0.
"""

from pathlib import Path

import numpy as np

MNIST = Path(__file__).parent.parent / "lenet" / "mnist_320.npz"
RECORDS = 2400


class Digits:
    """Pixels as they are in MNIST, `[28, 28]` uint8, and their labels."""

    def __init__(self) -> None:
        with np.load(MNIST) as archive:
            self.images, self.labels = archive["images"], archive["labels"]

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        chosen = indices % len(self.images)
        return {"x": self.images[chosen], "label": self.labels[chosen]}


source = Digits
