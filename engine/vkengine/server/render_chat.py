"""`/v1/chat/completions` answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .render import Renderer, Track, ids_json, quote

if TYPE_CHECKING:
    from vkengine.output import TokenLogprobs

    from .generation import Choice


class ChatRenderer(Renderer):
    prefix = "chatcmpl"
    stream_object = "chat.completion.chunk"
    object = "chat.completion"
    before, after = '"delta":{"content":', "}"

    def _opening(self, choice: Choice, text: str, track: Track) -> str:
        ids = ""
        if self.options.token_ids:
            ids = f',"prompt_token_ids":{ids_json(choice.prompt)}'
        return (
            f'{track.head}"delta":{{"role":"assistant","content":""}}{ids},'
            '"logprobs":null,"finish_reason":null}]}\n\n'
            f"{track.before}{quote(text)}{self.after}"
        )

    def _content(self, choice: Choice, track: Track) -> dict[str, Any]:
        logprobs = None
        if self.options.logprobs:
            logprobs = self._logprobs(track.logprobs, track.token_ids, track)
        message = {"role": "assistant", "content": "".join(track.text)}
        return {"message": message, "logprobs": logprobs}

    def _logprobs(
        self, entries: Iterable[TokenLogprobs | None], token_ids: Sequence[int], track: Track
    ) -> dict[str, Any]:
        content = []
        for entry, token_id in zip(entries, token_ids, strict=True):
            if entry is None:
                continue
            top = [self._entry(i, value) for i, value in entry.top]
            content.append({**self._entry(token_id, entry.logprob), "top_logprobs": top})
        return {"content": content}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.tokenizer.token_bytes(token_id) if self.tokenizer is not None else b""
        return {"token": self._name(token_id), "logprob": logprob, "bytes": list(raw)}
