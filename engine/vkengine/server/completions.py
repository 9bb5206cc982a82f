"""`/v1/completions` and `/v1/chat/completions`: from a body to a generation."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from vkengine.tokenizer import TemplateFailed, TemplateMissing

from .app import Service, read_body
from .errors import ApiError, field_error
from .generation import Generation
from .info import check_model, encode, service_of, tokenizer_of
from .protocol import ChatBody, CompletionBody, DraftBody, Sampling, parse
from .render import CompletionRenderer, Options
from .render_chat import ChatRenderer
from .stream import Answer

if TYPE_CHECKING:
    from starlette.requests import Request

    from vkengine.sampling import Draft, SamplingParams

DEFAULT_MAX_TOKENS = 16
# What a request that leaves a field out gets; never taken from a checkpoint's files.
SAMPLER_DEFAULTS = {
    "max_tokens": DEFAULT_MAX_TOKENS,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


async def complete(request: Request) -> Answer:
    service = service_of(request)
    body = parse(CompletionBody, await read_body(request, service.limits))
    check_model(service, body.model)
    prompts = [await _prompt_ids(service, body, prompt) for prompt in body.prompts()]
    scoring = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        if scoring is not None and scoring != body.logprobs:
            raise ApiError(400, "prompt_logprobs: differs from logprobs", param="prompt_logprobs")
        scoring = body.logprobs
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    options = Options(
        n=body.n or 1,
        echo=body.echo,
        discard_output=limit == 0,
        token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        prompt_logits=body.prompt_logits,
        **_usage(body),
    )
    generation = _generation(
        service,
        body,
        prompts,
        [max(limit, 1)] * len(prompts),
        logprobs=body.logprobs,
        scoring=scoring,
    )
    renderer = CompletionRenderer(
        generation, service.engine.model_name, service.tokenizer, options, body.request_id
    )
    return Answer(generation, renderer, stream=bool(body.stream), limit_s=service.limits.request_s)


async def chat(request: Request) -> Answer:
    service = service_of(request)
    body = parse(ChatBody, await read_body(request, service.limits))
    check_model(service, body.model)
    tokenizer = tokenizer_of(service, "messages")
    try:
        text = tokenizer.chat_prompt(
            [message.plain() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            **(body.chat_template_kwargs or {}),
        )
    except (TemplateMissing, TemplateFailed) as error:
        raise ApiError(400, f"messages: {error}", param="messages") from None
    prompt = await encode(tokenizer, text, body.add_special_tokens)
    _check_prompt(service, prompt, "messages")
    limit = body.max_completion_tokens or body.max_tokens
    if limit is None:
        limit = service.engine.max_model_len - len(prompt)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    options = Options(
        n=body.n or 1,
        token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
        logprobs=logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        prompt_logits=body.prompt_logits,
        **_usage(body),
    )
    generation = _generation(
        service, body, [prompt], [limit], logprobs=logprobs, scoring=body.prompt_logprobs
    )
    renderer = ChatRenderer(
        generation, service.engine.model_name, tokenizer, options, body.request_id
    )
    return Answer(generation, renderer, stream=bool(body.stream), limit_s=service.limits.request_s)


def _usage(body: Sampling) -> dict[str, bool]:
    options = body.stream_options
    always = options is not None and options.continuous_usage_stats
    return {"usage": options is not None and options.include_usage, "usage_always": always}


async def _prompt_ids(service: Service, body: CompletionBody, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(service, "prompt")
        prompt = await encode(tokenizer, prompt, body.add_special_tokens)
    _check_prompt(service, prompt, "prompt")
    return prompt


def _check_prompt(service: Service, prompt: list[int], field: str) -> None:
    vocabulary, longest = service.engine.vocab_size, service.engine.max_model_len
    if not prompt:
        raise ApiError(400, f"{field}: holds no token", param=field)
    if max(prompt) >= vocabulary:
        raise ApiError(
            400,
            f"{field}: id {max(prompt)} is outside the vocabulary of {vocabulary}",
            param=field,
        )
    if len(prompt) >= longest:
        raise ApiError(
            400,
            f"{field}: {len(prompt)} tokens leave no room in a context of {longest}",
            param=field,
        )


def _generation(
    service: Service,
    body: Sampling,
    prompts: list[list[int]],
    limits: list[int],
    *,
    logprobs: int | None,
    scoring: int | None,
) -> Generation:
    generation = Generation(service.driver, service.metrics)
    stops = body.stop_strings()
    if stops:
        tokenizer_of(service, "stop")
    try:
        params = _params(service, body, logprobs, scoring)
        for prompt, limit in zip(prompts, limits, strict=True):
            room = service.engine.max_model_len - len(prompt)
            if limit > room:
                raise ApiError(
                    400,
                    f"max_tokens: {limit} after a prompt of {len(prompt)} tokens is more than "
                    f"the context of {service.engine.max_model_len}",
                    param="max_tokens",
                )
            for choice in range(body.n or 1):
                generation.add(
                    prompt,
                    replace(params, max_tokens=limit, choice=choice),
                    tokenizer=service.tokenizer,
                    stops=stops,
                    include_stop=body.include_stop_str_in_output,
                    skip_special_tokens=body.skip_special_tokens,
                )
    except ValueError as error:
        raise field_error(error) from None
    return generation


def _params(
    service: Service, body: Sampling, logprobs: int | None, scoring: int | None
) -> SamplingParams:
    """The engine's view of the body; `max_tokens` and `choice` are set for each request."""
    from vkengine.sampling import SamplingParams

    given = {
        name: value
        for name in (
            "min_tokens",
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        if (value := getattr(body, name)) is not None
    }
    return SamplingParams(
        **given,
        max_tokens=max(given.get("min_tokens", 0), 1),
        top_k=max(body.top_k or 0, 0),
        logit_bias=body.bias(),
        # Drawn here, so that the answer can name it.
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=scoring,
        draft=None if body.draft is None else _draft(body.draft),
    )


def _draft(body: DraftBody) -> Draft:
    from vkengine.sampling import Draft

    acceptance = None if body.acceptance is None else body.acceptance.synthetic
    return Draft(method=body.method, k=body.k, head_rows=body.head_rows, acceptance=acceptance)
