"""Teacher-forced scores from a transformers model, for the stock profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .output import TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORE_ELEMENTS = 1 << 27  # logits held at once when scoring a prompt: 512 MiB of fp32


@torch.no_grad()
def score_prompt(model: PreTrainedModel, prompt: list[int], top: int) -> list[TokenLogprobs | None]:
    """Teacher-forced: one forward, then each token's rank and log-probability, in fp32.

    Entry 0 is None: nothing predicts the first token. The head runs over as many positions at
    a time as fit SCORE_ELEMENTS logits.
    """
    entries: list[TokenLogprobs | None] = [None]
    if len(prompt) == 1:
        return entries
    ids = torch.tensor([prompt], device=model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]  # [T, H]
    head = model.get_output_embeddings()
    rows = max(1, SCORE_ELEMENTS // head.weight.shape[0])
    for start in range(0, len(prompt) - 1, rows):
        end = min(start + rows, len(prompt) - 1)
        logits = capped_logits(model, head(hidden[start:end]).float())
        entries += score_rows(logits, prompt[start + 1 : end + 1], top)
    return entries


def capped_logits(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def score_rows(logits: torch.Tensor, token_ids: list[int], top: int) -> list[TokenLogprobs]:
    """logits: fp32 [T, V]."""
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    normaliser = logits.logsumexp(-1, keepdim=True)  # [T, 1]
    picked = logits.gather(-1, chosen)
    # Ties go to the lowest id, as everywhere.
    columns = torch.arange(logits.shape[-1], device=logits.device)
    ahead = (logits > picked) | ((logits == picked) & (columns < chosen))
    ranks = (1 + ahead.sum(-1)).tolist()
    best = logits.topk(min(top, logits.shape[-1]), -1) if top else None
    values = (picked - normaliser)[:, 0].tolist()
    sums = normaliser[:, 0].tolist()
    rows = []
    for i, token_id in enumerate(token_ids):
        pairs: list[tuple[int, float]] = []
        if best is not None:
            logprobs = (best.values[i] - normaliser[i]).tolist()
            pairs = list(zip(best.indices[i].tolist(), logprobs, strict=True))
            pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        rows.append(TokenLogprobs(token_id, values[i], pairs, ranks[i], sums[i]))
    return rows
