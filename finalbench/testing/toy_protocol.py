"""Request bodies of the toy server: every field is honoured or named in a 400."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse

from finalbench.testing.toy_model import MAX_LENGTH, VOCAB_SIZE


class BadField(ValueError):
    """A request field with a value the server refuses."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class DraftField(BaseModel):
    model_config = ConfigDict(extra="forbid")
    method: Literal["none", "mtp", "ngram"] = "none"
    k: int | Literal["auto"] = 0
    head_rows: int | None = None
    acceptance: dict[str, float] | None = None


class _Common(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_k: int | None = None
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    draft: DraftField | None = None
    user: str | None = None


class CompletionBody(_Common):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=100)
    prompt_logits: bool = False


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str
    content: str


class ChatBody(_Common):
    messages: list[Message]
    max_completion_tokens: int | None = None


Body = TypeVar("Body", CompletionBody, ChatBody)

_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "n": 1,
    "stop": None,
    "logprobs": None,
    "echo": False,
}


def parse_body(kind: type[Body], raw: bytes, *, drafts_allowed: bool) -> Body:
    """BadField names the first field that is unknown, malformed or not served by the toy."""
    try:
        body = kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = str(first["loc"][0]) if first["loc"] else "body"
        raise BadField(where, f"{where}: {first['msg']}") from error
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name, neutral)
        if value not in (neutral, None, [], {}):
            raise BadField(name, f"{name}: the toy server serves only {neutral!r}")
    draft = body.draft
    if draft is not None and draft.method != "none" and not drafts_allowed:
        raise BadField("draft", "draft: this server cannot draft")
    if draft is not None and isinstance(draft.k, int) and not 0 <= draft.k <= 8:
        raise BadField("draft", "draft: k must be 0 to 8 or 'auto'")
    return body


def check_ids(ids: list[int]) -> list[int]:
    if not ids:
        raise BadField("prompt", "prompt: empty")
    if len(ids) > MAX_LENGTH:
        raise BadField("prompt", f"prompt: {len(ids)} tokens, at most {MAX_LENGTH}")
    if not all(0 <= token < VOCAB_SIZE for token in ids):
        raise BadField("prompt", f"prompt: token ids must be 0 to {VOCAB_SIZE - 1}")
    return ids


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}
    return {
        "error": {
            "message": message,
            "type": kinds.get(status, "InternalServerError"),
            "param": param,
            "code": status,
        }
    }


def error_response(status: int, message: str, param: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message, param), status_code=status)
