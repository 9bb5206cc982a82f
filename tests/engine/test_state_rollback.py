"""State keyed by position: rollback, slots, numbers that are not finite, tiny decays."""

from __future__ import annotations

import pytest
import torch
from qwen import VOCAB, engine, generate, prompt
from vkengine.ops.gdn.cpu import BLOCK, fold
from vkengine.output import EngineFull
from vkengine.prefill import delta_rule, state_after
from vkengine.sampler import Sampler, make_processors
from vkengine.sampling import Draft, SamplingParams
from vkengine.state import RING_MASK, GdnState, bytes_per_sequence
from vkengine.step import Lane, run_round

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def sampler() -> Sampler:
    return Sampler(GREEDY, make_processors(GREEDY, [1], [], VOCAB), 0, VOCAB)


def prefilled(length: int):
    """An engine whose slot 0 holds ``prompt(length)``."""
    eng = engine()
    eng.add("r", prompt(length), GREEDY)
    while eng._running["r"].prefilling:
        eng.step()
    assert eng._running["r"].slot == 0
    return eng


def snapshot(eng, pos: int) -> list[torch.Tensor]:
    """Everything slot 0 holds of positions < pos, with whole blocks folded in.

    The fold may lag behind until the next round starts; folding is the same arithmetic whenever it
    happens, so states are compared after it.
    """
    state = eng.model.state
    recent = [p & RING_MASK for p in range(max(0, pos - 3), pos)]
    block = pos // BLOCK * BLOCK
    pending = [p & RING_MASK for p in range(block, pos)]
    folded = []
    for layer in state.layers:
        if not isinstance(layer, GdnState):
            continue
        s = layer.S[0]
        for start in range(int(layer.folded[0]), block, BLOCK):
            span = slice(start & RING_MASK, (start & RING_MASK) + BLOCK)
            ring = (layer.ring_k[0, span], layer.ring_u[0, span], layer.ring_g[0, span])
            s = fold(s, *ring, s.shape[0])
        folded.append(s)
    return [
        torch.stack(folded),
        state.ring_k[:, 0, pending],
        state.ring_u[:, 0, pending],
        state.ring_g[:, 0, pending],
        state.conv[:, 0, recent],
        state.k[:, 0, :pos],
        state.v[:, 0, :pos],
    ]


@pytest.mark.parametrize("length", [5, 7, 8, 13, 64, 70])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_e02_state_after_accept_j_is_that_of_j_single_steps(length: int, k: int) -> None:
    """Byte for byte, for every j, wherever blocks and units begin."""
    tokens = prompt(k + 2, seed=3)
    single = prefilled(length)
    snaps = []
    with torch.inference_mode():
        for i in range(k + 2):
            run_round(single.model, [Lane(0, length + i, tokens[i], sampler())])
            snaps.append([x.clone() for x in snapshot(single, length + i + 1)])
    for j in range(k + 1):
        eng = prefilled(length)
        with torch.inference_mode():
            drafts = tokens[1 : j + 1] + [(t + 1) % VOCAB for t in tokens[j + 1 : k + 1]]
            run_round(eng.model, [Lane(0, length, tokens[0], sampler(), drafts)])
            got = snapshot(eng, length + j + 1)
            for a, b in zip(got, snaps[j], strict=True):
                assert torch.equal(a, b), (j, "right after the round")
            # And once more after the next token has been run from there.
            run_round(eng.model, [Lane(0, length + j + 1, tokens[j + 1], sampler())])
            for a, b in zip(snapshot(eng, length + j + 2), snaps[j + 1], strict=True):
                assert torch.equal(a, b), (j, "one token later")


def test_e10_slot_reuse_leaves_nothing_behind() -> None:
    """The same prompt in a fresh engine and in a slot that served others."""
    ids = prompt(35)
    cold = engine()
    want = generate(cold, ids, GREEDY)
    warm = engine(max_sequences=1)
    for i in range(3):
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=50, draft=Draft("mtp", 5))
        generate(warm, prompt(60 + i), params)
    assert generate(warm, ids, GREEDY) == want
    end = len(ids) + len(want) - 1
    for a, b in zip(snapshot(warm, end), snapshot(cold, end), strict=True):
        assert torch.equal(a, b)


def test_e24_other_slots_keep_their_bytes() -> None:
    """While slot 1 alone decodes, slot 0's and the null slot's memory does not change."""
    eng = engine()
    eng.add("a", prompt(20), GREEDY)
    eng.add("b", prompt(30), GREEDY)
    for _ in range(3):
        eng.step()
    state = eng.model.state
    parts = (state.S, state.ring_k, state.ring_u, state.conv, state.k, state.v, state.mtp_k)
    before = [p.clone() for p in parts]
    lane = Lane(1, eng._running["b"].position, 5, sampler(), [1, 2, 3])
    assert eng._running["b"].slot == 1
    with torch.inference_mode():
        run_round(eng.model, [lane])
    for part, old in zip(parts, before, strict=True):
        slot_axis = 0 if part is state.mtp_k else 1
        for slot in (0, 2, 8):
            assert torch.equal(part.select(slot_axis, slot), old.select(slot_axis, slot))
    changed = [not torch.equal(p, o) for p, o in zip(parts, before, strict=True)]
    assert any(changed)


def test_e16_not_finite_state_ends_the_request_with_an_error() -> None:
    eng = engine()
    eng.add("good", prompt(12), GREEDY)
    eng.add("bad", prompt(13), GREEDY)
    eng.step()
    bad = eng._running["bad"].slot
    with torch.inference_mode():
        eng.model.state.S[1, bad, 0, 0, 0] = float("nan")
    assert not eng.model.state.is_finite(bad)
    finished = {}
    tokens = []
    while eng.has_work():
        for output in eng.step():
            if output.request_id == "good":
                tokens += output.token_ids
            if output.finish_reason:
                finished[output.request_id] = output
    assert finished["bad"].finish_reason == "error"
    assert "finite" in finished["bad"].error
    assert finished["good"].finish_reason == "length"
    # The freed slot is as good as new, and the neighbour noticed nothing.
    assert generate(eng, prompt(13), GREEDY) == generate(engine(), prompt(13), GREEDY)
    assert generate(engine(), prompt(12), GREEDY)[1:] == tokens[-29:]


def test_slots_run_out_and_come_back() -> None:
    eng = engine(max_sequences=2)
    eng.add("a", prompt(4), GREEDY)
    eng.add("b", prompt(4), GREEDY)
    with pytest.raises(EngineFull):
        eng.add("c", prompt(4), GREEDY)
    eng.abort("a")
    eng.add("c", prompt(4), GREEDY)
    eng.abort("nobody")
    assert eng.counters()["engine_full"] == 1.0
    while eng.has_work():
        eng.step()
    assert len(eng._free) == 2


def test_e101_state_size_is_known_at_start() -> None:
    eng = engine()
    stated = eng.settings()["state_bytes_per_sequence"]
    state = eng.model.state
    parts = (
        state.k, state.v, state.mtp_k, state.mtp_v, state.conv, state.S,
        state.ring_k, state.ring_u, state.ring_g,
    )  # fmt: skip
    total = sum(p.numel() * p.element_size() for p in parts)
    assert stated * (eng.max_sequences + 1) == total
    assert stated == bytes_per_sequence(eng.config, 512, torch.float32)


def sequential(q, k, v, log_decay, beta, s):
    """The rule as written, one token at a time."""
    out, updates = [], []
    for t in range(q.shape[1]):
        s = s * log_decay[:, t].exp()[:, None, None]
        u = beta[:, t, None] * (v[:, t] - torch.einsum("hkv,hk->hv", s, k[:, t]))
        s = s + k[:, t, :, None] * u[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", s, q[:, t]))
        updates.append(u)
    return torch.stack(out, 1), torch.stack(updates, 1), s


@pytest.mark.parametrize("decay", ["ordinary", "tiny", "none", "mixed"])
def test_e72_e73_chunk_form_equals_the_recurrence(decay: str) -> None:
    """Decay factors of 1e-12 (E72), exactly 1 (E73), and both in one chunk."""
    g = torch.Generator().manual_seed(0)
    hv, t, dk, dv = 2, 64, 16, 8
    q, k = (
        torch.nn.functional.normalize(torch.randn(hv, t, dk, generator=g), dim=-1) for _ in "qk"
    )
    v = torch.randn(hv, t, dv, generator=g)
    s = torch.randn(hv, dk, dv, generator=g)
    beta = torch.rand(hv, t, generator=g)
    tiny = torch.full((hv, t), -27.6)  # 1e-12 per token
    log_decay = {
        "ordinary": -torch.rand(hv, t, generator=g),
        "tiny": tiny,
        "none": torch.zeros(hv, t),
        "mixed": torch.where(torch.rand(hv, t, generator=g) < 0.3, tiny * 5, torch.zeros(hv, t)),
    }[decay]
    out, u = delta_rule(q, k, v, log_decay, beta, s)
    for count in (64, 40, 8):
        want, want_u, want_s = sequential(
            q[:, :count], k[:, :count], v[:, :count], log_decay[:, :count], beta[:, :count], s
        )
        assert torch.allclose(out[:, :count], want, atol=2e-5)
        assert torch.allclose(u[:, :count], want_u, atol=2e-5)
        assert torch.allclose(state_after(s, k, u, log_decay, count), want_s, atol=2e-5)
    assert torch.isfinite(out).all()
