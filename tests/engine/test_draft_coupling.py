"""What the real drafter's proposals are worth under coupling, against the exact expectation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from qwen import generate
from test_sampling_rules import noise_of
from torch import Tensor
from vkengine.engine import load_engine
from vkengine.sampler import Sampler
from vkengine.sampling import Draft, SamplingParams

TOKENS = 64
DRAWS = 4000  # keyed positions whose noise is drawn; each pair of rows takes some of them
PROMPT = [611, 1390, 27, 805, 5, 900, 17, 64]


@functools.cache
def tiny() -> Any:
    return load_engine("vk-tiny", max_model_len=256, threads=1)


@functools.cache
def pairs(head_rows: int | None) -> tuple[Tensor, Tensor, float]:
    """Processed rows [n, V] of target and drafter for the same positions of one sampled request,
    and the share of drafts that the engine accepted.
    """
    eng = tiny()
    rows: dict[bool, dict[int, Tensor]] = {True: {}, False: {}}
    drafting = False
    choose, propose = Sampler.choose, eng.drafter.propose

    def choose_and_note(
        self: Sampler, logits: Tensor, position: int, drafts: list[int], ahead: int = 0
    ) -> list[int]:
        rows[drafting][position] = logits[0].clone()
        return choose(self, logits, position, drafts, ahead)

    def propose_and_note(*args: Any) -> list[int]:
        nonlocal drafting
        drafting = True
        try:
            return propose(*args)
        finally:
            drafting = False

    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=TOKENS, ignore_eos=True,
        draft=Draft("mtp", 1, head_rows=head_rows),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "choose", choose_and_note)
        patch.setattr(eng.drafter, "propose", propose_and_note)
        before = eng.counters()
        generate(eng, PROMPT, params)
        after = eng.counters()
    both = sorted(rows[True].keys() & rows[False].keys())
    assert len(both) > TOKENS // 3
    spent = {name: after[name] - before[name] for name in before if "per_pos" not in name}
    share = spent["spec_decode_num_accepted_tokens"] / spent["spec_decode_num_draft_tokens"]
    return *(torch.stack([rows[who][p] for p in both]) for who in (False, True)), share


def expected_agreement(target: Tensor, drafter: Tensor) -> Tensor:
    """Chance [n] that both rows' Gumbel argmax is one id, when they share each id's noise.

    Id i wins in both when g_i - g_j is at least the larger of both log ratios, for every j; so its
    chance is 1 / sum_j max(p_j / p_i, q_j / q_i).
    """
    p, q = torch.softmax(target, -1), torch.softmax(drafter, -1)
    agreement = torch.zeros(len(p))
    for n in range(len(p)):
        both = torch.minimum(p[n], q[n])
        ids = torch.nonzero(both > 3e-5).flatten()  # the rest adds less than this test can see
        ratios = torch.maximum(p[n] / p[n, ids, None], q[n] / q[n, ids, None])
        agreement[n] = (1.0 / ratios.sum(-1)).sum()
        assert both[both <= 3e-5].sum() < 0.02
    return agreement


@pytest.mark.slow
@pytest.mark.parametrize("head_rows", [None, 1024])
def test_e41_acceptance_is_the_expected_one(head_rows: int | None) -> None:
    """Within one percent, with the noise keyed by vocabulary id under a pruned head too; and more
    than an argmax drafter or one with noise of its own would reach."""
    target, drafter, accepted = pairs(head_rows)
    vocab = target.shape[1]
    want = expected_agreement(target, drafter)
    noise = noise_of(77, DRAWS, vocab)
    picks = torch.randint(DRAWS, (len(target), 400), generator=torch.Generator().manual_seed(0))
    same, greedy = [], []
    for p, q, own in zip(target, drafter, picks, strict=True):
        drawn = (p + noise[own]).argmax(-1)
        same.append((drawn == (q + noise[own]).argmax(-1)).double().mean())
        greedy.append((drawn == q.argmax()).double().mean())
    got = float(torch.stack(same).mean())
    assert got == pytest.approx(float(want.mean()), abs=0.01)
    # The one run itself, as far as its few hundred draws can tell.
    spread = float((want * (1 - want)).sum().sqrt()) / len(want)
    assert abs(accepted - float(want.mean())) < 4 * spread + 0.01
    p, q = torch.softmax(target, -1), torch.softmax(drafter, -1)
    assert got > float((p * q).sum(-1).mean()) + 0.05
    assert got > float(torch.stack(greedy).mean())
