"""Answers in OpenAI's shapes. Stream chunks are put together from a template made once a choice,
so that a chunk costs one `json.dumps` of its own text and little else.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkengine.output import TokenLogprobs
    from vkengine.tokenizer import Tokenizer

    from .generation import Choice, Delta, Generation

quote = json.encoder.encode_basestring_ascii  # type: ignore[attr-defined]
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Options:
    """What the request asked to see."""

    n: int = 1
    echo: bool = False
    discard_output: bool = False  # max_tokens 0: only the prompt comes back
    token_ids: bool = False
    tokens_as_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    prompt_logits: bool = False
    usage: bool = False
    usage_always: bool = False


@dataclass(slots=True)
class Track:
    """Where one choice's answer stands."""

    head: str
    before: str  # head and all else that comes before a chunk's text
    started: bool = False
    token_count: int = 0
    text_offset: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Renderer:
    """Common to completions and chat; one per request."""

    prefix = ""
    stream_object = ""
    object = ""
    before, after = "", ""  # what encloses the text of a chunk

    def __init__(
        self,
        generation: Generation,
        model: str,
        tokenizer: Tokenizer | None,
        options: Options,
        request_id: str | None,
    ) -> None:
        self.id = request_id or f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self.generation = generation
        self._common = (
            f'{{"id":{quote(self.id)},"object":"{self.stream_object}",'
            f'"created":{self.created},"model":{quote(model)},"choices":['
        )
        self._tracks = [
            Track(head := f'data: {self._common}{{"index":{choice.index},', head + self.before)
            for choice in generation.choices
        ]

    def chunk(self, delta: Delta) -> bytes:
        """One `data:` event for one step of one choice."""
        track, options = self._tracks[delta.choice.index], self.options
        if options.discard_output:
            delta.text, delta.token_ids, delta.logprobs = "", [], None
        track.token_count += len(delta.token_ids)
        if track.started:
            body = f"{track.before}{quote(delta.text)}{self.after}"
        else:
            track.started = True
            body = self._opening(delta.choice, delta.text, track)
        if options.token_ids:
            body += f',"token_ids":{ids_json(delta.token_ids)}'
        logprobs = self._logprobs_json(delta, track) if options.logprobs else "null"
        if delta.finish_reason is None:
            body += f',"logprobs":{logprobs},"finish_reason":null}}]'
        else:
            reason = json.dumps(delta.stop_reason)
            body += f',"logprobs":{logprobs},"finish_reason":"{delta.finish_reason}"'
            body += f',"stop_reason":{reason}}}]'
        if options.usage_always:
            body += f',"usage":{json.dumps(self.usage())}'
        return (body + "}\n\n").encode()

    def plain_chunk(self, choice: Choice) -> Callable[[str, list[int]], bytes] | None:
        """`chunk` for text and ids of a started choice; None where chunks may hold more."""
        options = self.options
        if options.logprobs or options.usage_always or options.discard_output:
            return None
        track = self._tracks[choice.index]
        before, after = track.before, self.after
        end = ',"logprobs":null,"finish_reason":null}]}\n\n'

        def with_ids(text: str, token_ids: list[int]) -> bytes:
            track.token_count += len(token_ids)
            ids = token_ids[0] if len(token_ids) == 1 else ",".join(map(str, token_ids))
            return f'{before}{quote(text)}{after},"token_ids":[{ids}]{end}'.encode()

        def without_ids(text: str, token_ids: list[int]) -> bytes:
            track.token_count += len(token_ids)
            return f"{before}{quote(text)}{after}{end}".encode()

        return with_ids if options.token_ids else without_ids

    def last_chunk(self) -> bytes:
        """The usage event, when asked for, and the end of the stream."""
        if not self.options.usage:
            return DONE
        usage = json.dumps(self.usage())
        metrics = json.dumps(self.metrics())
        return f'data: {self._common}],"usage":{usage},"metrics":{metrics}}}\n\n'.encode() + DONE

    def collect(self, delta: Delta) -> None:
        """The same, for an answer that is not streamed."""
        track = self._tracks[delta.choice.index]
        if not self.options.discard_output:
            track.token_count += len(delta.token_ids)
            track.text.append(delta.text)
            track.token_ids += delta.token_ids
            track.logprobs += delta.logprobs or []
        track.finish_reason, track.stop_reason = delta.finish_reason, delta.stop_reason

    def answer(self) -> dict[str, Any]:
        choices = []
        for choice, track in zip(self.generation.choices, self._tracks, strict=True):
            entry: dict[str, Any] = {"index": choice.index}
            entry.update(self._content(choice, track))
            entry["finish_reason"] = track.finish_reason
            entry["stop_reason"] = track.stop_reason
            if self.options.token_ids:
                entry["prompt_token_ids"] = choice.prompt
                entry["token_ids"] = track.token_ids
            if self.options.prompt_logprobs:
                entry["prompt_logprobs"] = self._scores(choice)
            choices.append(entry)
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": self.usage(),
            "metrics": self.metrics(),
        }

    def usage(self) -> dict[str, int]:
        choices = self.generation.choices
        prompt = sum(len(choice.prompt) for choice in choices[:: self.options.n])
        completion = sum(track.token_count for track in self._tracks)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def metrics(self) -> dict[str, Any]:
        """Drafting figures, summed over choices; cut by a stop string: up to the step it is in."""
        stats = [choice.stats for choice in self.generation.choices if choice.stats is not None]
        depth = max((len(s.accepted_per_pos) for s in stats), default=0)
        per_position = [
            sum(s.accepted_per_pos[i] for s in stats if i < len(s.accepted_per_pos))
            for i in range(depth)
        ]
        return {
            "speculative_decoding": {
                "num_drafts": sum(s.drafts for s in stats),
                "num_draft_tokens": sum(s.draft_tokens for s in stats),
                "num_accepted_tokens": sum(s.accepted_tokens for s in stats),
                "num_accepted_tokens_per_pos": per_position,
            },
            "seed": self.generation.choices[0].params.seed,
        }

    def _opening(self, choice: Choice, text: str, track: Track) -> str:
        """The first chunk up to its token ids."""
        raise NotImplementedError

    def _content(self, choice: Choice, track: Track) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(
        self, entries: Iterable[TokenLogprobs | None], token_ids: Sequence[int], track: Track
    ) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs_json(self, delta: Delta, track: Track) -> str:
        return json.dumps(self._logprobs(delta.logprobs or [], delta.token_ids, track))

    def _scores(self, choice: Choice) -> list[dict[str, dict[str, float]] | None]:
        """Prompt scoring: id -> log-probability and rank, from rank 1 on, and the actual token."""
        logits = self.options.prompt_logits
        return [
            None if entry is None else _score(entry, logits)
            for entry in choice.prompt_logprobs or []
        ]

    def _name(self, token_id: int) -> str:
        if self.options.tokens_as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)


def ids_json(token_ids: Sequence[int]) -> str:
    return f"[{','.join(map(str, token_ids))}]"


def _score(entry: TokenLogprobs, with_logits: bool) -> dict[str, dict[str, float]]:
    ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
    if entry.token_id not in ranked:
        ranked[entry.token_id] = (entry.logprob, entry.rank)
    scores: dict[str, dict[str, float]] = {}
    for token_id, (logprob, rank) in ranked.items():
        score: dict[str, float] = {"logprob": logprob, "rank": rank}
        if with_logits:
            score["logit"] = logprob + entry.logsumexp
        scores[str(token_id)] = score
    return scores


class CompletionRenderer(Renderer):
    prefix = "cmpl"
    stream_object = object = "text_completion"
    before, after = '"text":', ""

    def _opening(self, choice: Choice, text: str, track: Track) -> str:
        extra = ""
        if self.options.echo:
            text = self._prompt_text(choice) + text
        if self.options.token_ids:
            extra = f',"prompt_token_ids":{ids_json(choice.prompt)}'
        return f"{track.before}{quote(text)}{extra}"

    def _content(self, choice: Choice, track: Track) -> dict[str, Any]:
        text = "".join(track.text)
        logprobs = None
        if self.options.echo:
            text = self._prompt_text(choice) + text
        if self.options.logprobs:
            entries: list[TokenLogprobs | None] = [*track.logprobs]
            ids = track.token_ids
            if self.options.echo:
                entries = [*(choice.prompt_logprobs or []), *entries]
                ids = [*choice.prompt, *ids]
            logprobs = self._logprobs(entries, ids, track)
        return {"text": text, "logprobs": logprobs}

    def _prompt_text(self, choice: Choice) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(choice.prompt, skip_special_tokens=False)

    def _logprobs(
        self, entries: Iterable[TokenLogprobs | None], token_ids: Sequence[int], track: Track
    ) -> dict[str, Any]:
        tokens, chosen, tops, offsets = [], [], [], []
        for entry, token_id in zip(entries, token_ids, strict=True):
            name = self._name(token_id)
            tokens.append(name)
            chosen.append(None if entry is None else entry.logprob)
            top = None
            if entry is not None:
                top = {self._name(i): value for i, value in entry.top}
                top.setdefault(name, entry.logprob)
            tops.append(top)
            offsets.append(track.text_offset)
            track.text_offset += len(name)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
