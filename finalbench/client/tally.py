"""Adds up the events of one stream: tokens, text, usage, ends and errors. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

REASONING_FIELDS = ("reasoning_content", "reasoning")
UsageKind = Literal["final", "cumulative", "incremental"]


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """As the server reports it. `completion` contains reasoning tokens, it is never added to."""

    prompt: int
    completion: int


@dataclass(frozen=True, slots=True)
class SpecCounts:
    """Speculative counters of one request; `drafts` counts verify rounds."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """`chunks` are (ns, tokens), 0 tokens where unknown."""

    chunks: tuple[tuple[int, int], ...]
    token_ids: tuple[int, ...]
    usage: TokenUsage | None
    usage_kind: UsageKind | None
    source: Literal["ids", "usage"] | None


@dataclass(slots=True)
class _Chunk:
    at_ns: int
    ids: int | None  # token ids in the event, None when the server sent no such field
    usage: int | None  # completion_tokens in the same event


@dataclass(slots=True)
class Tally:
    """Feed every event in order, then ask for `totals()`."""

    chunks: list[_Chunk] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] | None = None
    final_usage: TokenUsage | None = None
    running_usage: list[TokenUsage] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spec: SpecCounts | None = None
    seed: int | None = None
    done_seen: bool = False
    error: str | None = None
    events: int = 0
    server_ns: list[int] = field(default_factory=list)

    def fail(self, message: str) -> None:
        """The first failure is kept; later ones usually follow from it."""
        if self.error is None:
            self.error = message

    def event(self, at_ns: int, name: str | None, data: bytes) -> None:
        self.events += 1
        if data == b"[DONE]" or data.strip() == b"[DONE]":
            self.done_seen = True
            return
        try:
            document = json.loads(data)
        except ValueError:
            self.fail(f"an event is not JSON: {data[:60]!r}")
            return
        if not isinstance(document, dict):
            self.fail(f"an event is not an object: {data[:60]!r}")
            return
        if (
            name == "error"
            or document.get("error") is not None
            or document.get("object") == "error"
        ):
            self.fail(f"error event: {error_text(data)}")
            return
        try:
            self._document(at_ns, document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.fail(f"an event has the wrong shape: {error}")

    def _document(self, at_ns: int, document: dict[str, Any]) -> None:
        usage = _usage(document.get("usage"))
        running = _timed(document.get("timings"))
        if running is not None:
            if usage is not None:
                self.final_usage = usage
            usage = running
        choices = document.get("choices") or ()
        if not choices and usage is not None:
            self.final_usage = usage
        for choice in choices:
            if choice.get("index", 0) == 0:
                self._choice(at_ns, choice, usage)
        if "t_ns" in document:
            self.server_ns.append(int(document["t_ns"]))
        metrics = document.get("metrics")
        if isinstance(metrics, dict):
            self._metrics(metrics)

    def _choice(self, at_ns: int, choice: dict[str, Any], usage: TokenUsage | None) -> None:
        ids = choice.get("token_ids")
        text, reasoning = _channels(choice)
        # A token without text (an end token, half a character) shows only in a usage that grew.
        grew = False
        if usage is not None:
            before = self.running_usage[-1].completion if self.running_usage else 0
            grew = ids is None and usage.completion > before
            self.running_usage.append(usage)
        if choice.get("prompt_token_ids") is not None and self.prompt_token_ids is None:
            self.prompt_token_ids = tuple(choice["prompt_token_ids"])
        if ids or text or reasoning or grew:
            count = len(ids) if ids is not None else None
            self.chunks.append(_Chunk(at_ns, count, usage.completion if usage else None))
            if ids:
                self.ids.extend(ids)
            if reasoning:
                self.reasoning.append(reasoning)
                self.text.append(reasoning)
            if text:
                self.text.append(text)
        if choice.get("finish_reason") is not None:
            self.finish_reason = choice["finish_reason"]
            self.stop_reason = choice.get("stop_reason")

    def _metrics(self, metrics: dict[str, Any]) -> None:
        spec = metrics.get("speculative_decoding")
        if isinstance(spec, dict):
            self.spec = SpecCounts(
                drafts=int(spec["num_drafts"]),
                draft_tokens=int(spec["num_draft_tokens"]),
                accepted_tokens=int(spec["num_accepted_tokens"]),
                accepted_per_pos=tuple(spec.get("num_accepted_tokens_per_pos") or ()),
            )
        if isinstance(metrics.get("seed"), int):
            self.seed = metrics["seed"]

    def totals(self) -> Totals:
        """Counts per chunk and in all, from ids where every content chunk has them."""
        chunks = self.chunks
        # Ids count only when no content came without them: a part of the ids is not a count.
        by_ids = bool(self.ids) and all(chunk.ids is not None for chunk in chunks)
        usage, kind = self._usage()
        if by_ids:
            counts = [chunk.ids or 0 for chunk in chunks]
        elif kind == "cumulative":
            counts, before = [], 0
            for chunk in chunks:
                now = before if chunk.usage is None else chunk.usage
                counts.append(max(0, now - before))
                before = now
        elif kind == "incremental":
            counts = [chunk.usage or 0 for chunk in chunks]
        else:
            counts = [0] * len(chunks)
        return Totals(
            chunks=tuple((chunk.at_ns, n) for chunk, n in zip(chunks, counts, strict=True)),
            token_ids=tuple(self.ids) if by_ids else (),
            usage=usage,
            usage_kind=kind,
            source="ids" if by_ids else ("usage" if usage is not None else None),
        )

    def _usage(self) -> tuple[TokenUsage | None, UsageKind | None]:
        """Which of the usage events is the total.

        Running usage is cumulative when it grows with every event and does not contradict the
        final one or the ids; otherwise each event tells its own tokens.
        """
        running = self.running_usage
        if not running:
            return self.final_usage, ("final" if self.final_usage is not None else None)
        counts = [usage.completion for usage in running]
        growing = all(a < b for a, b in pairwise(counts))
        known = self.final_usage.completion if self.final_usage is not None else None
        if known is None and self.ids:
            known = len(self.ids)
        if known is not None and len(counts) > 1 and known in (counts[-1], sum(counts)):
            cumulative = known == counts[-1]
        else:
            cumulative = growing
        if self.final_usage is not None:
            usage = self.final_usage
        elif cumulative:
            usage = running[-1]
        else:
            usage = TokenUsage(prompt=running[-1].prompt, completion=sum(counts))
        return usage, ("cumulative" if cumulative else "incremental")


def _channels(choice: dict[str, Any]) -> tuple[str, str]:
    """(text, reasoning) of a choice, from the completion or the chat form."""
    delta = choice.get("delta")
    source = delta if isinstance(delta, dict) else choice
    text = source.get("content") or source.get("text") or ""
    for name in REASONING_FIELDS:
        if source.get(name):
            return text, source[name]
    return text, ""


def _usage(value: Any) -> TokenUsage | None:
    if not isinstance(value, dict) or value.get("completion_tokens") is None:
        return None
    return TokenUsage(
        prompt=int(value.get("prompt_tokens") or 0), completion=int(value["completion_tokens"])
    )


def _timed(value: Any) -> TokenUsage | None:
    """llama.cpp's running count, which comes with every chunk when it is asked for."""
    if not isinstance(value, dict) or not isinstance(value.get("predicted_n"), int):
        return None
    prompt = int(value.get("prompt_n") or 0) + int(value.get("cache_n") or 0)
    return TokenUsage(prompt=prompt, completion=value["predicted_n"])


def error_text(data: bytes) -> str:
    """One line from an error body in OpenAI's form, or the start of whatever came."""
    try:
        document = json.loads(data)
    except ValueError:
        return data[:200].decode("utf-8", errors="replace").strip() or "no message"
    if not isinstance(document, dict):
        return str(document)[:200]
    error = document.get("error", document)
    if isinstance(error, dict):
        return str(error.get("message") or error)[:500]
    return str(error)[:500]
