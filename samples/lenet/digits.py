"""Makes the digit files of this folder from the MNIST test set in IDX form; `for_lenet` is what training does with digits.

    python digits.py t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz

`mnist_320.npz` holds the first 320 digits as they are (`images`, `labels`), to train on, `mnist_160.npz` the 160 after these, to
evaluate on. `digits.npz` and `digits_7.npz` hold the first 32 and the 7 after these as LeNet's input `x`: 32x32 pixels, bilinear,
mean 0 and standard deviation 1 over MNIST.

Data: MNIST by Y. LeCun, C. Cortes and C. Burges, CC BY-SA 3.0.
"""

import gzip
import sys
from pathlib import Path

import numpy as np

MEAN, DEVIATION = 0.1307, 0.3081


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file of bytes, gzipped or not."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if data[:3] != b"\0\0\x08":
        raise SystemExit(f"{path}: not an IDX file of bytes")
    axes = data[3]
    shape = np.frombuffer(data, ">u4", axes, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def resized(images: np.ndarray, size: int) -> np.ndarray:
    """Square uint8 images at another size: bilinear between pixel centres, rounded to uint8."""
    side = images.shape[-1]
    at = np.clip((np.arange(size) + 0.5) * side / size - 0.5, 0, side - 1)
    low = np.minimum(at.astype(int), side - 2)
    part = (at - low).astype(np.float32)
    rows = images[:, low] * (1 - part)[:, None] + images[:, low + 1] * part[:, None]
    both = rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part
    return np.rint(both).astype(np.uint8)


def lenet_input(images: np.ndarray) -> np.ndarray:
    """`[n, 1, 32, 32]` float32, normalized."""
    x = resized(images, 32).astype(np.float32) / np.float32(255)
    return ((x - np.float32(MEAN)) / np.float32(DEVIATION))[:, None]


def for_lenet(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch of digits as they are in MNIST, as LeNet takes them."""
    return {**batch, "x": lenet_input(batch["x"])}


def main(images: Path, labels: Path, folder: Path) -> None:
    digits, classes = read_idx(images)[:480], read_idx(labels)[:480]
    np.savez_compressed(folder / "mnist_320.npz", images=digits[:320], labels=classes[:320])
    np.savez_compressed(folder / "mnist_160.npz", images=digits[320:], labels=classes[320:])
    np.savez_compressed(folder / "digits.npz", x=lenet_input(digits[:32]))
    np.savez_compressed(folder / "digits_7.npz", x=lenet_input(digits[32:39]))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python digits.py IMAGES LABELS")
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(__file__).parent)
