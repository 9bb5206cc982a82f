"""One request's token choice: processors, keyed noise, logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .ops.sample import Processors, gumbel, process, row_key
from .output import TokenLogprobs
from .sampling import SamplingParams

#: The noise of synthetic acceptance must not be that of any token choice.
ACCEPTANCE_CHOICE = 0x5EED0000


def make_processors(
    params: SamplingParams, prompt: list[int], banned: list[int], vocab: int
) -> Processors:
    """Settings and counts of one request; ``banned`` is what min_tokens forbids."""
    bias = params.logit_bias or {}
    greedy = params.temperature == 0
    p = Processors(
        temperature=params.temperature,
        top_k=0 if greedy else params.top_k,
        top_p=1.0 if greedy else params.top_p,
        min_p=0.0 if greedy else params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        bias_ids=torch.tensor(list(bias)) if bias else None,
        bias=torch.tensor(list(bias.values()), dtype=torch.float32) if bias else None,
        min_tokens=params.min_tokens,
        banned_ids=torch.tensor(sorted(banned)) if banned and params.min_tokens else None,
    )
    if p.penalises:
        p.prompt_seen = torch.zeros(vocab, dtype=torch.bool)
        p.prompt_seen[torch.tensor(prompt)] = True
        p.counts = torch.zeros(vocab)
    p.plain = greedy and not bias and not p.penalises and p.banned_ids is None
    return p


@dataclass(slots=True)
class Sampler:
    """Chooses tokens for one request. ``generated`` counts the tokens emitted so far."""

    params: SamplingParams
    processors: Processors
    seed: int
    vocab: int
    generated: int = 0
    noise: dict[int, Tensor] = field(default_factory=dict)  # absolute position -> [V]

    @property
    def plain(self) -> bool:
        return self.processors.plain

    def commit(self, tokens: list[int], position: int) -> None:
        """Count emitted tokens; ``position`` is the next token's. Older noise is dropped."""
        self.generated += len(tokens)
        counts = self.processors.counts
        if counts is not None:
            counts.index_add_(0, torch.tensor(tokens), torch.ones(len(tokens)))
        for old in [p for p in self.noise if p < position]:
            del self.noise[old]

    def noise_at(self, position: int) -> Tensor:
        """Gumbel noise [V] of the token at an absolute position."""
        found = self.noise.get(position)
        if found is None:
            key = row_key(self.seed, self.params.choice, position)
            found = gumbel(key, torch.arange(self.vocab, dtype=torch.int32))
            self.noise[position] = found
        return found

    def scores(self, logits: Tensor, position: int, drafts: list[int], ahead: int = 0) -> Tensor:
        """Processed logits plus noise, [M, V], for tokens at position, position + 1, ...

        ``drafts``: the draft tokens that rows 1.. follow; ``ahead``: how many tokens beyond the
        emitted ones row 0 already follows (they must be ``drafts[:ahead]``).
        """
        p = self.processors
        if ahead:
            x = process(_shifted(logits, ahead), p, self.generated, drafts)[ahead:]
        else:
            x = process(logits, p, self.generated, drafts)
        if p.temperature > 0:
            rows = range(position, position + logits.shape[0])
            x = x + torch.stack([self.noise_at(at) for at in rows])
        return x

    def choose(self, logits: Tensor, position: int, drafts: list[int], ahead: int = 0) -> list[int]:
        """Token ids for rows of ``scores``; ties go to the lowest id."""
        if self.plain:
            return torch.argmax(logits, dim=-1).tolist()
        return torch.argmax(self.scores(logits, position, drafts, ahead), dim=-1).tolist()


def _shifted(logits: Tensor, ahead: int) -> Tensor:
    """Rows of zeros before ``logits`` so that row index equals prefix length."""
    return torch.cat((logits.new_zeros(ahead, logits.shape[1]), logits))


def logprobs_of(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Natural-log probabilities from raw logits [M, V]: each token's own and the ``top`` best."""
    total = torch.logsumexp(logits, dim=-1)
    chosen = torch.tensor(tokens)
    own = logits.gather(1, chosen[:, None])[:, 0]
    better = (logits > own[:, None]).sum(-1)
    lower = torch.arange(logits.shape[1])[None] < chosen[:, None]
    ties = ((logits == own[:, None]) & lower).sum(-1)
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    best = (values[:, :top] - total[:, None]).tolist()
    best_ids = ids[:, :top].tolist()
    result = []
    for row, token in enumerate(tokens):
        entry = TokenLogprobs(
            token_id=token,
            logprob=float(own[row] - total[row]),
            top=list(zip(best_ids[row], best[row], strict=True)),
            rank=int(better[row] + ties[row]) + 1,
            logsumexp=float(total[row]),
        )
        result.append(entry)
    return result


def synthetic_acceptance(seed: int, choice: int, position: int, chance: float) -> bool:
    """Whether the draft for ``position`` counts as accepted; a pure function of its key."""
    word = row_key(seed, choice ^ ACCEPTANCE_CHOICE, position)[0]
    return (word >> 8) * 2.0**-24 < chance
