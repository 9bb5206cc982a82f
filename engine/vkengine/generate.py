"""One prompt through an engine, for `vk generate`; the shortest use of the Python API."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine
    from .sampling import SamplingParams
    from .tokenizer import Tokenizer


def generate_text(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str,
    params: SamplingParams,
    *,
    chat: bool = False,
    write: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Text goes to `write` as it comes; returns ids, text, finish reason and the seed.

    Raises ValueError when the prompt is empty or too long, or has no chat template.
    """
    if chat:
        text = tokenizer.chat_prompt([{"role": "user", "content": prompt}])
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("prompt: holds no token")
    detokenizer = tokenizer.detokenizer()
    pieces: list[str] = []
    token_ids: list[int] = []
    finish, stats = None, None
    engine.add("generate", ids, params)
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason == "error":
                raise RuntimeError(output.error)
            token_ids += output.token_ids
            piece = "".join(detokenizer.push(token_id) for token_id in output.token_ids)
            finish, stats = output.finish_reason, output.stats
            if finish is not None:
                piece += detokenizer.flush()
            pieces.append(piece)
            if write is not None:
                write(piece)
    return {
        "schema_version": 1,
        "model": engine.model_name,
        "prompt_tokens": len(ids),
        "token_ids": token_ids,
        "text": "".join(pieces),
        "finish_reason": finish,
        "seed": None if stats is None else stats.seed,
    }
