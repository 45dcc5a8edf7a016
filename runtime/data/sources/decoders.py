"""The values of the members of a sample, by the extension of their names.

| extension | value |
|---|---|
| .npy | the array |
| .cls, .id, .index | a whole number |
| .json | numbers, and lists of such |
| .txt, .text | text |
| .png, .jpg, .jpeg | uint8, height x width, or x channels where there are several; Pillow decodes them |
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from partc.runtime.artifact.tensors.dtypes import Array

from ...errors import UsageError
from ..npy import array_of


def _number(data: bytes) -> int:
    return int(data.decode().strip())


def _json(data: bytes) -> Array:
    array = np.asarray(json.loads(data))
    if array.dtype.kind not in "biuf":
        raise ValueError("it is not a number, nor a list of such")
    return array


def _image(data: bytes) -> Array:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB") if image.mode in ("P", "CMYK", "YCbCr") else image)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "npy": array_of,
    **dict.fromkeys(("cls", "id", "index"), _number),
    "json": _json,
    **dict.fromkeys(("txt", "text"), bytes.decode),
    **dict.fromkeys(("png", "jpg", "jpeg"), _image),
}


def check_decoder(extension: str, where: str) -> None:
    """UsageError where a decoder needs a package that is not installed."""
    if DECODERS[extension] is _image:
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise UsageError(
                f"{where}: its samples have .{extension}, which Pillow decodes, and it is not installed\n  help: pip install pillow"
            ) from None
