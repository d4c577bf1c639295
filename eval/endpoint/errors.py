"""Errors of the endpoint, in the form that OpenAI clients read."""

from __future__ import annotations

from typing import Any

from v41flash.errors import InputError


class ApiError(InputError):
    """A request that is answered by an error.

    Attributes:
        status: of HTTP.
        kind: the error's `type`.
        param: the field at fault, or None.
        code: short name of the error, or None.
        headers: more of the answer's headers.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        """See the attributes."""
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        # What a client sent may hold half characters, which JSON cannot.
        text = " ".join(str(self).split()).encode("utf-8", "backslashreplace").decode()
        return {
            "error": {
                "message": text,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }
