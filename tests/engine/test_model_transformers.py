"""The model against transformers' own modules: fp32, prefill then decode."""

from __future__ import annotations

import pytest
import torch
from qwen import VOCAB, checkpoint, engine, prompt, reference
from vkengine.config import read_config
from vkengine.models.qwen3_5 import logits_of
from vkengine.prefill import UNIT, Span, prefill_unit
from vkengine.sampler import Sampler, make_processors
from vkengine.sampling import SamplingParams
from vkengine.step import Lane, run_round

TOLERANCE = 1e-4
SHAPES = [(True, False), (True, True), (False, False), (False, True)]


def prefill(eng, ids: list[int], slot: int = 0) -> torch.Tensor:
    """Logits after every prompt position, [len, V]."""
    eng.model.state.reset(slot)
    rows = []
    with torch.inference_mode():
        for start in range(0, len(ids), UNIT):
            span = Span(slot, start, min(UNIT, len(ids) - start))
            tokens = torch.tensor(ids[start : span.end])
            h = prefill_unit(eng.model.weights, eng.model.state, tokens, span, eng.model.ws)
            rows.append(logits_of(h, eng.model.weights)[1])
    return torch.cat(rows)


def lane(position: int, last: int, drafts: list[int], slot: int = 0) -> Lane:
    params = SamplingParams(temperature=0)
    sampler = Sampler(params, make_processors(params, [1], [], VOCAB), 0, VOCAB)
    return Lane(slot, position, last, sampler, drafts)


@pytest.mark.parametrize(("moe", "tied"), SHAPES)
def test_prefill_then_decode_matches_transformers(moe: bool, tied: bool) -> None:
    eng, stock = engine(moe=moe, tied=tied), reference(moe=moe, tied=tied)
    for length in (1, 2, 3, 5, 16, 63, 64, 65, 70):
        ids = prompt(length + 12)
        with torch.no_grad():
            want = stock(torch.tensor([ids])).logits[0]
        got = prefill(eng, ids[:length])
        assert (got - want[:length]).abs().max() < TOLERANCE, length
        # The rest in rounds of 1, 4 and 7 rows, each fed the true tokens as drafts.
        at = length
        for rows in (1, 4, 7):
            with torch.inference_mode():
                verdict = run_round(eng.model, [lane(at, ids[at], ids[at + 1 : at + rows])])
            assert (verdict[0].logits - want[at : at + rows]).abs().max() < TOLERANCE, (length, at)
            at += rows


def test_every_prompt_length_to_70() -> None:
    eng, stock = engine(), reference()
    ids = prompt(70)
    with torch.no_grad():
        want = stock(torch.tensor([ids])).logits[0]
    for length in range(1, 71, 3):
        got = prefill(eng, ids[:length])
        assert (got - want[:length]).abs().max() < TOLERANCE, length


def test_logits_are_not_degenerate() -> None:
    """The tolerance would mean nothing if the logits were tiny or flat."""
    logits = prefill(engine(), prompt(20))
    assert logits.std() > 0.5
    assert len(set(logits.argmax(-1).tolist())) > 5


def test_config_forms_agree() -> None:
    plain = read_config(checkpoint())
    nested = read_config(checkpoint(style="model.language_model."))
    assert plain.layer_types == ("gdn", "gdn", "gdn", "attention")
    assert plain.rotary_dim == 16
    for name in ("hidden_size", "num_experts", "rotary_dim", "rope_theta", "tied", "mtp_layers"):
        assert getattr(plain, name) == getattr(nested, name), name
