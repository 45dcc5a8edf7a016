"""What a client is told of a request that is not met: a status, and the body that OpenAI's API has for errors."""

from __future__ import annotations

from typing import Any

from partc.runtime.errors import printable

_LONGEST = 2000


class RefusedError(Exception):
    """A request that is not met: the HTTP status, the text, the field that is wrong, and a code for programs.

    `retry`: seconds after which it may be tried again.
    """

    def __init__(
        self, status: int, text: str, field: str | None = None, code: str | None = None, retry: int = 0
    ) -> None:
        super().__init__(text)
        self.status, self.field, self.code, self.retry = status, field, code, retry

    def body(self) -> dict[str, Any]:
        """The document of the answer."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return error_body(str(self), kind if self.status != 429 else "rate_limit_error", self.field, self.code)


def without_traceback(text: str) -> str:
    """The message of a failure as clients get it: of an internal fault the exception alone, its traceback is in the server's output."""
    if not text.startswith("Traceback"):
        return text
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "Traceback", "partc: "))]
    return f"a rank has failed: {lines[-1] if lines else 'see the output of the server'}"


def error_body(text: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The document of an error; control characters of its text are escaped, and a long text is cut."""
    shown = printable(text)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} ..."
    return {"error": {"message": shown, "type": kind, "param": field, "code": code}}
