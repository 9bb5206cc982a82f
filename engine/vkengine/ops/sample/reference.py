"""Logit processors, one row per position, each with that position's own prefix.

Order: logit bias, minimum tokens (stop ids banned), repetition, frequency and presence penalties,
temperature, top-k, top-p, min-p. The target's token is the argmax of the processed logits plus
keyed Gumbel noise; temperature 0 is the argmax of the processed logits alone (the filters keep
the largest logit, so they cannot change it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEG_INF = float("-inf")
#: How many of a row's largest logits are ordered before the whole row is.
CANDIDATES = 256


@dataclass(slots=True)
class Processors:
    """One request's sampling settings and token counts, on the logits' device."""

    temperature: float
    top_k: int  # 0 = off
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    bias_ids: Tensor | None  # [n] i64
    bias: Tensor | None  # [n] f32
    min_tokens: int
    banned_ids: Tensor | None  # [s] i64: what min_tokens forbids
    prompt_seen: Tensor | None = None  # [V] bool
    counts: Tensor | None = None  # [V] f32, tokens emitted so far
    plain: bool = False  # greedy with no processor: an argmax is all there is

    @property
    def penalises(self) -> bool:
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0


def penalise(logits: Tensor, p: Processors, drafts: list[int]) -> Tensor:
    """Apply the three penalties. Row j counts the emitted tokens and ``drafts[:j]``."""
    assert p.counts is not None and p.prompt_seen is not None
    rows = logits.shape[0]
    counts = p.counts.expand(rows, -1).clone()
    for j, token in enumerate(drafts[: rows - 1]):
        counts[j + 1 :, token] += 1.0
    emitted = counts > 0
    if p.repetition != 1.0:
        scaled = torch.where(logits > 0, logits / p.repetition, logits * p.repetition)
        logits = torch.where(emitted | p.prompt_seen, scaled, logits)
    return logits - p.frequency * counts - p.presence * emitted.float()


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest of each row; equal values are kept in order of id."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    least = torch.topk(logits, k, dim=-1).values[:, -1:]
    above, equal = logits > least, logits == least
    room = k - above.sum(-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(-1) <= room))), NEG_INF)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set whose probability reaches top_p, best first, at least one id.

    Rows are ordered by value, then id. Most nuclei are small, so the few hundred best are ordered
    first and a row is sorted as a whole only when its nucleus reaches the last of them.
    """
    if top_p >= 1.0:
        return logits
    probs = torch.softmax(logits, dim=-1)
    ids = torch.topk(logits, min(CANDIDATES, logits.shape[-1]), dim=-1).indices.sort(-1).values
    keep, settled = _nucleus(logits, probs, ids, top_p)
    if ids.shape[-1] < logits.shape[-1] and not bool(settled.all()):
        every = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
        keep = torch.where(settled, keep, _nucleus(logits, probs, every, top_p)[0])
    return logits.masked_fill(~keep, NEG_INF)


def _nucleus(logits: Tensor, probs: Tensor, ids: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The nucleus among ``ids [M, n]`` (ascending): keep [M, V] bool; and [M, 1] whether every
    kept value exceeds the least candidate, so that no id outside could belong.
    """
    values, order = torch.sort(logits.gather(-1, ids), dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    mass = probs.gather(-1, ids)
    inside = (mass.cumsum(-1) - mass) < top_p
    inside[:, 0] = True
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, ids, inside)
    tie = inside & (values == values[:, -1:])
    return keep, ~tie.any(-1, keepdim=True)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Drop ids less probable than ``min_p`` times the most probable."""
    if min_p <= 0.0:
        return logits
    probs = torch.softmax(logits, dim=-1)
    return logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), NEG_INF)


def process(logits: Tensor, p: Processors, generated: int, drafts: list[int]) -> Tensor:
    """Processed logits [M, V] of one request; the input is not changed.

    ``generated``: tokens emitted before row 0's token. ``drafts``: the draft tokens of rows 1..;
    row j's prefix is the emitted tokens and ``drafts[:j]``.
    """
    if p.plain:
        return logits
    x = logits.clone()
    if p.bias_ids is not None and p.bias is not None:
        x[:, p.bias_ids] += p.bias
    if p.banned_ids is not None and generated < p.min_tokens:
        short = min(p.min_tokens - generated, x.shape[0])
        x[:short, p.banned_ids] = NEG_INF
    if p.penalises:
        x = penalise(x, p, drafts)
    if p.temperature > 0:
        x = x / p.temperature
        x = keep_min_p(keep_top_p(keep_top_k(x, p.top_k), p.top_p), p.min_p)
    return x
