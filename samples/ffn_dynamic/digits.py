"""Makes inputs of the network from the MNIST digits that lie beside the LeNet: `python digits.py 8 64 512`.

Each number is a batch: `digits_64.npz` holds the first 64 digits as the input `x`, pixels from 0 to 1; after 320 they begin
again. `from_0_to_1` is what training does with digits. Data: MNIST by Y. LeCun, C. Cortes and C. Burges, CC BY-SA 3.0.
"""

import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
MNIST = FOLDER.parent / "lenet" / "mnist_320.npz"


def digits(batch: int) -> np.ndarray:
    """`[batch, 1, 28, 28]` float32."""
    with np.load(MNIST) as archive:
        images = archive["images"]
    return images[np.arange(batch) % len(images), None].astype(np.float32) / np.float32(255)


def from_0_to_1(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch of digits as they are in MNIST, as the network takes them."""
    return {**batch, "x": batch["x"].astype(np.float32) / np.float32(255)}


if __name__ == "__main__":
    if not sys.argv[1:] or not all(text.isdecimal() and int(text) for text in sys.argv[1:]):
        raise SystemExit("usage: python digits.py BATCH ...")
    for size in map(int, sys.argv[1:]):
        np.savez_compressed(FOLDER / f"digits_{size}.npz", x=digits(size))
