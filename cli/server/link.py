"""Messages between the server and the loop of steps, JSON lines over a socket; this module has the loop's end.

| from | message | meaning |
|---|---|---|
| server | `{"admit": 7, "request": {...}}` | a request joins |
| server | `{"cancel": 7}` | it leaves |
| server | `{"change": ["letters", "letters/adapter_model.safetensors", {"q_proj": 2.0}]}` | an adapter joins; without a file it leaves |
| server | `{"end": true}` | no request follows, and none is open |
| loop | `{"ready": true, "adapters": [..]}` | the ranks have loaded; the names of places of adapters |
| loop | `{"changed": [""], "adapters": [..]}` | for each change in order the reason for its failure, empty if it succeeded |
| loop | `{"made": [[7, [306, 12], ""]], "used": 1, "waiting": 0, "seconds": [0.004], "cached": [[7, 64]]}` | steps: tokens, slots |

For a request with `logprobs` an entry of `made` also has the scores of its tokens, and those of tokens of its prompt, each as `[-0.7,
[[306, -0.7], [12, -1.2]]]`. For requests of embeddings `embedded` has the float32 embedding as base64: `[[7, "..."]]`. `drafts` has the
numbers of drafts since the last message, and of those that were right: `[12, 7]`.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from typing import Any

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
MOST_BYTES = 1 << 25
"""The most bytes of a message."""
_READ = 1 << 16


class Link:
    """The loop's end of a connected socket; its methods raise ConnectionError if the other end has closed."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._read = bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message."""
        self._socket.sendall(_ENCODE(message).encode() + b"\n")

    def receive(self, seconds: float) -> list[dict[str, Any]]:
        """Returns the messages that have arrived, or else those that arrive next within `seconds` seconds."""
        read = False
        while select.select([self._socket], [], [], seconds)[0]:
            data = self._socket.recv(_READ)
            if not data:
                raise ConnectionError("the server has ended")
            self._read += data
            read, seconds = True, 0.0
        if not read:
            return []
        *lines, rest = self._read.split(b"\n")
        self._read = bytearray(rest)
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
