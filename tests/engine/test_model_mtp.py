"""The MTP drafter against a plain reading of the published module on transformers' layer."""

from __future__ import annotations

import pytest
import torch
from qwen import VOCAB, checkpoint, engine, prompt, reference, text_config
from safetensors.torch import load_file
from torch import Tensor
from vkengine.sampler import Sampler, make_processors
from vkengine.sampling import SamplingParams


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w)


class Module:
    """fc(concat[norm(embed(t+1)), norm(h_t)]) -> one full-attention layer -> norm -> head."""

    def __init__(self, moe: bool) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as sparse

        self.t = load_file(checkpoint(moe=moe) / "model.safetensors")
        config = text_config(moe, False)
        config._attn_implementation = "eager"
        code = sparse if moe else dense
        prefix = "Qwen3_5Moe" if moe else "Qwen3_5"
        self.layer = getattr(code, f"{prefix}DecoderLayer")(config, 3)  # layer 3 is full attention
        self.rotary = getattr(code, f"{prefix}TextRotaryEmbedding")(config)
        at = "mtp.layers.0."
        own = {n.removeprefix(at): x for n, x in self.t.items() if n.startswith(at)}
        self.layer.load_state_dict(own)

    def __call__(self, hidden: Tensor, following: list[int]) -> Tensor:
        """hidden [T, H] at positions 0..T-1, the T tokens after them -> post-norm output [T, H]."""
        e = self.t["model.embed_tokens.weight"][torch.tensor(following)]
        x = torch.cat(
            (
                norm(e, self.t["mtp.pre_fc_norm_embedding.weight"]),
                norm(hidden, self.t["mtp.pre_fc_norm_hidden.weight"]),
            ),
            dim=-1,
        )
        x = (x @ self.t["mtp.fc.weight"].T)[None]
        length = x.shape[1]
        positions = torch.arange(length)[None].expand(3, 1, -1)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            y = self.layer(x, position_embeddings=self.rotary(x, positions), attention_mask=mask)
        y = y[0] if isinstance(y, tuple) else y
        return norm(y[0], self.t["mtp.norm.weight"])


def trunk_hidden(moe: bool, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return reference(moe=moe).model(torch.tensor([ids])).last_hidden_state[0]


class Recorder(Sampler):
    """Greedy, and keeps the logits it saw."""

    seen: list[Tensor]

    def choose(self, logits, position, drafts, ahead=0):
        self.seen.append(logits.clone())
        return super().choose(logits, position, drafts, ahead)


def recorder() -> Recorder:
    params = SamplingParams(temperature=0)
    sampler = Recorder(params, make_processors(params, [1], [], VOCAB), 0, VOCAB)
    sampler.seen = []
    return sampler


@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("length", [1, 9, 70])
def test_drafts_match_the_module(moe: bool, length: int) -> None:
    """A chain of three drafts: logits within 1e-4 of the module run over whole sequences."""
    module, eng = Module(moe), engine(moe=moe)
    ids = prompt(length)
    hidden = trunk_hidden(moe, ids)
    first = 5  # an arbitrary accepted token after the prompt
    head = module.t["lm_head.weight"]
    sampler = recorder()
    with torch.inference_mode():
        if length > 1:
            eng.drafter.prefill(0, 0, hidden[:-1], torch.tensor(ids[1:]))
        drafts = eng.drafter.propose(0, length - 1, hidden[-1:], [first], 3, sampler)
    following, states = [*ids[1:], first], hidden
    for step in range(3):
        out = module(states, following)
        logits = out[-1] @ head.T
        assert (sampler.seen[step][0] - logits).abs().max() < 1e-4, step
        assert drafts[step] == int(logits.argmax())
        # The chain: the module's own output is the next position's hidden state.
        states = torch.cat((states, out[-1:]))
        following.append(drafts[step])


def test_several_accepted_rows_equal_one_by_one() -> None:
    """Ingesting three accepted positions at once or singly leaves the same next draft."""
    ids = prompt(20)
    hidden = trunk_hidden(True, ids)
    seen = []
    for at_once in (True, False):
        eng, sampler = engine(), recorder()
        with torch.inference_mode():
            eng.drafter.prefill(0, 0, hidden[:16], torch.tensor(ids[1:17]))
            if not at_once:
                eng.drafter.propose(0, 16, hidden[16:17], ids[17:18], 4, recorder())
                eng.drafter.propose(0, 17, hidden[17:18], ids[18:19], 2, recorder())
                eng.drafter.propose(0, 18, hidden[18:19], ids[19:20], 1, sampler)
            else:
                eng.drafter.propose(0, 16, hidden[16:19], ids[17:20], 1, sampler)
        seen.append(sampler.seen[0])
    assert (seen[0] - seen[1]).abs().max() < 1e-5


def test_pruned_head_scores_its_rows_alone() -> None:
    """E85: row i of a pruned head is vocabulary id i."""
    ids = prompt(12)
    hidden = trunk_hidden(True, ids)
    eng = engine()
    with torch.inference_mode():
        eng.drafter.prefill(0, 0, hidden[:-1], torch.tensor(ids[1:]))
        full, few = recorder(), recorder()
        eng.drafter.propose(0, 11, hidden[-1:], [5], 1, full)
        drafts = eng.drafter.propose(0, 11, hidden[-1:], [5], 1, few, head_rows=100)
    assert few.seen[0].shape == (1, 100)
    assert (few.seen[0][0] - full.seen[0][0, :100]).abs().max() < 1e-5
    assert drafts[0] == int(full.seen[0][0, :100].argmax())
