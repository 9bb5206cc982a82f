"""Errors as OpenAI clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import JSONResponse

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.@+-]+/)+[\w.@+-]*")


class ApiError(Exception):
    """Ends a request with `status`; `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Addresses of this machine's files are not the client's affair, so they are cut."""
        return {
            "error": {
                "message": _PATH.sub("<path>", str(self)),
                "type": TYPES.get(self.status, "InternalServerError"),
                "param": self.param,
                "code": self.status,
            }
        }

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def field_error(error: ValueError) -> ApiError:
    """The engine's `ValueError("<field>: ...")` as a 400 that names the field."""
    message = str(error)
    field, separator, _ = message.partition(":")
    named = separator and re.fullmatch(r"[a-z_.]+", field)
    return ApiError(400, message, param=field if named else None)
