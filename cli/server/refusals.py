"""Errors for clients: a status, and the body of an error in OpenAI's API."""

from __future__ import annotations

from typing import Any

from partc.runtime.errors import printable

_LONGEST = 2000


class RefusedError(Exception):
    """A request that is refused: the HTTP status, the text, the wrong field, and a code for programs.

    `retry`: seconds after which the client may try again.
    """

    def __init__(
        self, status: int, text: str, field: str | None = None, code: str | None = None, retry: int = 0
    ) -> None:
        super().__init__(text)
        self.status, self.field, self.code, self.retry = status, field, code, retry

    def body(self) -> dict[str, Any]:
        """Returns the document of the answer."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return error_body(str(self), kind if self.status != 429 else "rate_limit_error", self.field, self.code)


def without_traceback(text: str) -> str:
    """Returns the message of a failure for clients: of an internal fault only the exception; the server's output has the traceback."""
    if not text.startswith("Traceback"):
        return text
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "Traceback", "partc: "))]
    return f"a rank has failed: {lines[-1] if lines else 'see the output of the server'}"


def error_body(text: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns the document of an error; control characters in its text are escaped, and a long text is cut."""
    shown = printable(text)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} ..."
    return {"error": {"message": shown, "type": kind, "param": field, "code": code}}
