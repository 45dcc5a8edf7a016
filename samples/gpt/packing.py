"""Documents packed into rows of one length: the lines of `sonnets.txt`, several to a row, the longest that fits first.

A row says of each token its place in its document, and the document's number in the row: a token sees no other document, and its position
begins with its own. The label of a document's last token, and of what fills a row up, is -100, which the loss ignores.
"""

from collections.abc import Sequence

import numpy as np
from sonnets import TEXT

LENGTH, NO_LABEL = 128, -100


def packed(documents: Sequence[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Arrays of rows, as few as first-fit makes them; what fills a row up is a document of its own."""
    rows: list[list[np.ndarray]] = []
    for document in sorted(documents, key=len, reverse=True):
        row = next((row for row in rows if sum(map(len, row)) + len(document) <= length), None)
        if row is None:
            rows.append(row := [])
        row.append(document)
    arrays = {name: np.zeros((len(rows), length), np.int64) for name in ("ids", "position_ids", "documents")}
    arrays["labels"] = np.full((len(rows), length), NO_LABEL, np.int64)
    for number, row in enumerate(rows):
        ends = np.cumsum([len(document) for document in row])
        for place, (document, end) in enumerate(zip(row, ends, strict=True), 1):
            begin = end - len(document)
            arrays["ids"][number, begin:end] = document
            arrays["position_ids"][number, begin:end] = np.arange(len(document))
            arrays["documents"][number, begin:end] = place
            arrays["labels"][number, begin : end - 1] = document[1:]
        arrays["position_ids"][number, ends[-1] :] = np.arange(length - ends[-1])
    return arrays


def source() -> dict[str, np.ndarray]:
    return packed(documents(), LENGTH)


def documents() -> list[np.ndarray]:
    """A token is a byte."""
    return [np.frombuffer(f"{line}\n".encode(), np.uint8) for line in TEXT.read_text().splitlines() if line]
