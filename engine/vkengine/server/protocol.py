"""Request bodies. A field is honoured or refused with 400 naming it; none is ever ignored."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ApiError

DraftMethod = Literal["none", "mtp", "ngram"]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = list[TokenId]
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SyntheticAcceptance(Body):
    synthetic: float = Field(ge=0, le=1)


class DraftBody(Body):
    method: DraftMethod = "none"
    k: Annotated[int, Field(ge=0, le=8)] | Literal["auto"] = 0
    head_rows: Annotated[int, Field(ge=1)] | None = None
    acceptance: SyntheticAcceptance | None = None


class Sampling(Body):
    """The fields completions and chat share. None means: the server's default."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logits: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    draft: DraftBody | None = None
    request_id: str | None = Field(None, min_length=1, max_length=128)
    user: str | None = None  # names the end user; it changes no output

    @model_validator(mode="after")
    def _shared_rules(self) -> Sampling:
        _refuse(
            "stop", any(not text for text in self.stop_strings()), "a stop string may not be empty"
        )
        _refuse(
            "stream_options", bool(self.stream_options) and not self.stream, "needs stream: true"
        )
        scoring = self.prompt_logprobs is not None
        _refuse("prompt_logprobs", scoring and bool(self.stream), "is not available in a stream")
        _refuse("prompt_logits", self.prompt_logits and not scoring, "needs prompt_logprobs")
        return self

    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def bias(self) -> dict[int, float] | None:
        """logit_bias with its keys as ids."""
        if not self.logit_bias:
            return None
        _refuse(
            "logit_bias",
            any(not key.isascii() or not key.isdigit() for key in self.logit_bias),
            "keys are token ids",
        )
        return {int(key): value for key, value in self.logit_bias.items()}


class CompletionBody(Sampling):
    prompt: str | Tokens | list[str] | list[Tokens]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _rules(self) -> CompletionBody:
        if isinstance(self.prompt, list):
            _refuse("prompt", not self.prompt, "is empty")
            _refuse("prompt", any(part == [] for part in self.prompt), "holds an empty list")
        _refuse(
            "best_of",
            self.best_of is not None and self.best_of != (self.n or 1),
            "only best_of = n is served",
        )
        _refuse(
            "max_tokens",
            self.max_tokens == 0 and not self.echo,
            "0 needs echo: nothing would be returned",
        )
        return self

    def prompts(self) -> list[str] | list[Tokens]:
        """One entry a prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # ty: ignore[invalid-explicit-return]
        return self.prompt  # ty: ignore[invalid-explicit-return]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None

    def plain(self) -> dict[str, Any]:
        fields = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text for part in self.content)
        return {"content": "", **fields}


class ResponseFormat(Body):
    type: Literal["text"]


class ChatBody(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool = False  # templates write them themselves

    @model_validator(mode="after")
    def _rules(self) -> ChatBody:
        _refuse("top_logprobs", bool(self.top_logprobs) and not self.logprobs, "needs logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        _refuse(
            "max_tokens",
            None not in both and both[0] != both[1],
            "differs from max_completion_tokens",
        )
        return self


class TokenizeBody(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Tokens


B = TypeVar("B", bound=Body)


class FieldRefused(ValueError):
    """Carries the field's name through pydantic's own error."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def _refuse(field: str, wrong: bool, message: str) -> None:
    if wrong:
        raise FieldRefused(field, message)


def parse(model: type[B], body: bytes) -> B:
    """Raises ApiError(400) naming the first field at fault."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _explain(model, error) from None


def _explain(model: type[Body], error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False, include_input=False)
    unknown = [p for p in problems if p["type"] == "extra_forbidden"]
    first = (unknown or problems)[0]
    location = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    field = ".".join(str(part) for part in location) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if unknown:
        name = str(first["loc"][-1])[:64]
        near = difflib.get_close_matches(name, _names(model, first["loc"][:-1]), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return ApiError(400, f"unknown field '{name}'{hint}", param=name)
    refused = first.get("ctx", {}).get("error")
    if isinstance(refused, FieldRefused):
        return ApiError(400, str(refused), param=refused.field)
    return ApiError(400, f"{field or 'body'}: {first['msg']}", param=field)


def _names(model: type[Body], location: tuple[int | str, ...]) -> list[str]:
    nested: dict[str, type[Body]] = {
        "draft": DraftBody,
        "stream_options": StreamOptions,
        "messages": Message,
        "acceptance": SyntheticAcceptance,
    }
    for part in reversed(location):
        if part in nested:
            return list(nested[str(part)].model_fields)
    return list(model.model_fields)
