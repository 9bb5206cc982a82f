"""Blocks, layers and logits of true width against transformers' own modules, on the same weights.

transformers runs a text in one causal pass; ours puts its first tokens into the state as a prompt
and takes the rest in a round of the decode kernels. Each of our blocks is given what transformers'
block was given, so that an error is that block's own. A second model of transformers, in fp32 over
the same values, tells what transformers' own rounding to bf16 amounts to.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from vkengine.checkpoint import random_source
from vkengine.config import KNOWN_SHAPES, ModelConfig
from vkengine.gpu_prefill import ROWS, Prefill
from vkengine.graph import Round
from vkengine.lanes import WIDTH, Lanes
from vkengine.models.build import Builder, Source, rotary_tables
from vkengine.models.layout import AttentionWeights, ModelWeights, MoeWeights
from vkengine.ops.attention import triton as attention_kernels
from vkengine.ops.gdn import triton as gdn_kernels
from vkengine.ops.mlp import triton as mlp_kernels
from vkengine.ops.moe import triton as moe_kernels
from vkengine.rows import Rows, Workspace
from vkengine.state import State, cache_length
from vkengine.stock_model import text_config

#: Other people's modules may warn of what they like.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
CUDA = torch.device("cuda")
MAX_LEN = 1008
#: The text's length, and the shortest prompt.
TOKENS, PROMPT = 128, 64
LAYERS = ("gdn", "gdn", "gdn", "attention")
#: Router logits further apart than this are in one order in bf16 and in fp32: around 4 to 8, where
#: the last chosen ones lie, bf16 values are 1/32 apart.
CLEAR = {torch.bfloat16: 0.06, torch.float32: 1e-4}
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
#: Of logits after four layers. In bf16 each of eight blocks adds some 0.4 % of its own, on either
#: side, and a token of the prompt whose last expert is another one moves what follows it.
LOGITS_LIMIT = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


def shape(name: str) -> ModelConfig:
    return replace(KNOWN_SHAPES[name], num_layers=len(LAYERS), layer_types=LAYERS)


def source_of(config: ModelConfig, dtype: torch.dtype) -> Source:
    """Random tensors by name, with gains off 1, all of them values of ``dtype``."""
    draw = random_source(config, 0, CUDA, dtype)

    def source(name: str, size: tuple[int, ...]) -> Tensor:
        x = draw(name, size)
        if name.endswith("norm.weight"):
            generator = torch.Generator(device=CUDA).manual_seed(zlib.crc32(name.encode()))
            x = x + 0.1 * torch.randn(size, generator=generator, device=CUDA)
        return x.to(dtype)

    return source


def stock(config: ModelConfig, source: Source, dtype: torch.dtype) -> Any:
    """transformers' model over the same tensors."""
    described = text_config(config)
    # The plain loop over experts: the grouped product is a kernel of its own.
    described._experts_implementation = "eager"
    with no_init_weights(), torch.device(CUDA):
        model = AutoModelForCausalLM.from_config(
            described, dtype=dtype, attn_implementation="eager"
        )
    for name, parameter in model.named_parameters():
        parameter.copy_(source(name, tuple(parameter.shape)))
    return model.eval()


@dataclass(slots=True)
class Call:
    """What a module was called with, and gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Tensor  # [T, H]

    @property
    def hidden(self) -> Tensor:
        return (self.args[0] if self.args else self.kwargs["hidden_states"])[0]


def plain(out: Any) -> Tensor:
    return (out[0] if isinstance(out, tuple) else out)[0]


def record(model: Any, ids: Tensor) -> tuple[dict[str, Call], Tensor]:
    """Every call within the layers by the module's name, and the logits ``[T, V]``."""
    calls: dict[str, Call] = {}
    handles = []
    for name, module in model.model.named_modules():
        if name.startswith("layers.") and name.count(".") in (1, 2):

            def hook(_: Any, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                calls[name.removeprefix("layers.")] = Call(args, kwargs, plain(out))

            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return calls, logits


@dataclass(slots=True)
class Pair:
    """Ours and transformers' over the same weights, and transformers' in fp32 (``exact``)."""

    config: ModelConfig
    dtype: torch.dtype
    weights: ModelWeights
    exact: Any
    ids: Tensor
    calls: dict[str, Call]
    exact_calls: dict[str, Call]
    logits: Tensor
    exact_logits: Tensor

    @staticmethod
    def make(config: ModelConfig, dtype: torch.dtype) -> Pair:
        source = source_of(config, dtype)
        cos, sin = rotary_tables(config, cache_length(MAX_LEN), CUDA)
        weights = Builder(config, source, CUDA, dtype, cos, sin).model("model.", mtp=False)
        model = stock(config, source, dtype)
        exact = model if dtype == torch.float32 else stock(config, source, torch.float32)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, config.vocab_size, (TOKENS,), generator=generator).to(CUDA)
        calls, logits = record(model, ids)
        exact_calls, exact_logits = (
            (calls, logits) if exact is model else record(exact, ids)
        )  # fmt: skip
        return Pair(
            config, dtype, weights, exact, ids, calls, exact_calls, logits, exact_logits
        )  # fmt: skip

    def exactly(self, name: str, hidden: Tensor) -> Tensor:
        """The fp32 module's output for ``hidden [T, H]``."""
        module = self.exact.model.get_submodule("layers." + name)
        call, hidden = self.exact_calls[name], hidden.float()[None]
        if call.args:
            return plain(module(hidden, *call.args[1:], **call.kwargs))
        return plain(module(**{**call.kwargs, "hidden_states": hidden}))

    def clear(self, layer: int) -> Tensor:
        """[T] Rows whose last chosen expert is well above the first one that is not."""
        if not self.config.is_moe:
            return torch.ones(TOKENS, dtype=torch.bool, device=CUDA)
        x = self.exactly(f"{layer}.post_attention_layernorm", self.middle(layer))
        router = self.exact.model.get_submodule(f"layers.{layer}.mlp.gate").weight
        top = F.linear(x, router).topk(self.config.experts_per_token + 1).values
        return top[:, -2] - top[:, -1] > CLEAR[self.dtype]

    def middle(self, layer: int) -> Tensor:
        """The stream before the feed-forward."""
        return self.calls[f"{layer}.post_attention_layernorm"].hidden


PAIRS = [
    pytest.param((name, dtype), id=f"{name.split('-')[1]}-{kind}")
    for name in ("qwen35-35b-a3b", "qwen36-27b")
    for dtype, kind in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"))
]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # the convolution; on unless it is turned off
    name, dtype = request.param
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        # transformers' reference code, also where these are installed: fp32 must be fp32.
        for package in ("fla", "causal_conv1d"):
            patch.setitem(sys.modules, package, None)
        yield Pair.make(shape(name), dtype)
    if CUDA.type == "cuda":
        torch.cuda.empty_cache()


def ours(
    p: Pair, layer: int, h: Tensor, n: int, m: int, *, mixer: bool, feed_forward: bool
) -> Tensor:
    """Rows ``[n + m, H]`` of the stream after the layer (or one block of it): ``n`` as a prompt,
    ``m`` in a round."""
    w = p.weights.layers[layer]
    one = replace(p.config, num_layers=1, layer_types=(p.config.layer_types[layer],))
    state = State(one, 1, MAX_LEN, CUDA, p.dtype, False)
    ws = Workspace(CUDA)
    prompt = Prefill(p.weights, state, ws)
    past = F.pad(h[:n], (0, 0, 0, -n % ROWS))
    if mixer:
        prompt._mixer(past, w, state.layers[0], 0, 0, n)
        state.folded[0] = n
    if feed_forward:
        prompt._feed_forward(past, w, n)
    live = h[n : n + m].clone()
    where = torch.tensor([0, n], dtype=torch.int32, device=CUDA)
    valid = torch.ones(m, dtype=torch.bool, device=CUDA)
    rows = Rows(where[:1], where[1:], m, valid)
    if mixer:
        attends = isinstance(w.mixer, AttentionWeights)
        mix: Any = attention_kernels.attention if attends else gdn_kernels.gdn
        mix(live, w.mixer, state.layers[0], rows, ws)
    if feed_forward:
        feed: Any = moe_kernels.moe if isinstance(w.ffn, MoeWeights) else mlp_kernels.mlp
        feed(live, w.ffn, None, rows, ws)
    return torch.cat((past[:n], live))


def start_of(clear: Tensor, m: int) -> int:
    """The first position from ``PROMPT`` on with ``m`` clear rows."""
    runs = clear.tolist()
    return next(n for n in range(PROMPT, TOKENS - m + 1) if all(runs[n : n + m]))


def error(a: Tensor, b: Tensor) -> float:
    """Relative error in the 2-norm; NaN is above every limit."""
    found = float((a.double() - b.double()).norm() / b.double().norm())
    return found if found == found else float("inf")


@dataclass(slots=True)
class Errors:
    """Ours against the module, ours against fp32, the module against fp32."""

    text: list[str]
    worst: float = 0.0

    def add(self, name: str, got: Tensor, module: Tensor, exact: Tensor) -> None:
        mine = error(got, module)
        self.worst = max(self.worst, mine)
        self.text.append(
            f"{name}: ours to the module {mine:.2e}, ours to fp32 {error(got, exact):.2e}, "
            f"the module to fp32 {error(module, exact):.2e}"
        )

    def check(self, limit: float) -> None:
        report = "\n".join(self.text)
        print(report)
        assert self.worst < limit, f"limit {limit:.0e}\n{report}"


@pytest.mark.parametrize("m", [1, 4])
@torch.no_grad()
def test_mixers(pair: Pair, m: int) -> None:
    """Gated DeltaNet and gated attention with the norm before them."""
    found, n = Errors([]), PROMPT
    for i, kind in enumerate(LAYERS):
        name = f"{i}.linear_attn" if kind == "gdn" else f"{i}.self_attn"
        h = pair.calls[f"{i}"].hidden
        module = pair.calls[name].out
        exact = pair.exactly(name, pair.exactly(f"{i}.input_layernorm", h))
        got = ours(pair, i, h.float(), n, m, mixer=True, feed_forward=False)
        got = got - h[: n + m].float()
        for part, rows in (("prompt", slice(0, n)), (f"round of {m}", slice(n, n + m))):
            found.add(f"layer {i} {kind}, {part}", got[rows], module[rows], exact[rows])
    found.check(LIMIT[pair.dtype])


@pytest.mark.parametrize("m", [1, 4])
@torch.no_grad()
def test_feed_forward(pair: Pair, m: int) -> None:
    """Experts or dense, with the norm before them."""
    found = Errors([])
    for i in range(len(LAYERS)):
        clear, h = pair.clear(i), pair.middle(i)
        n = start_of(clear, m)
        module = pair.calls[f"{i}.mlp"].out
        exact = pair.exactly(f"{i}.mlp", pair.exactly(f"{i}.post_attention_layernorm", h))
        got = ours(pair, i, h.float(), n, m, mixer=False, feed_forward=True)
        got = got - h[: n + m].float()
        past = clear[:n].nonzero()[:, 0]
        found.add(f"layer {i}, prompt", got[past], module[past], exact[past])
        found.add(f"layer {i}, round of {m}", got[n:], module[n : n + m], exact[n : n + m])
    found.check(LIMIT[pair.dtype])


@pytest.mark.parametrize("m", [1, 4])
@torch.no_grad()
def test_layers(pair: Pair, m: int) -> None:
    """Whole decoder layers."""
    found = Errors([])
    for i, kind in enumerate(LAYERS):
        clear, h = pair.clear(i), pair.calls[f"{i}"].hidden
        n = start_of(clear, m)
        module, exact = pair.calls[f"{i}"].out, pair.exactly(f"{i}", h)
        got = ours(pair, i, h.float(), n, m, mixer=True, feed_forward=True)
        past = clear[:n].nonzero()[:, 0]
        found.add(f"layer {i} {kind}, prompt", got[past], module[past], exact[past])
        found.add(f"layer {i} {kind}, round of {m}", got[n:], module[n : n + m], exact[n : n + m])
    found.check(LIMIT[pair.dtype])


@pytest.mark.parametrize("m", [1, 4])
@torch.no_grad()
def test_logits(pair: Pair, m: int) -> None:
    """All layers and the head: a prompt, then a round that is given the true tokens as drafts."""
    clear = torch.stack([pair.clear(i) for i in range(len(LAYERS))]).all(0)
    # Among the rows of a round some will have a close choice in some layer; those are left out.
    n = max(range(PROMPT, TOKENS - m + 1), key=lambda n: int(clear[n : n + m].sum()))
    rows = clear[n : n + m].nonzero()[:, 0]
    assert len(rows) > 0
    state = State(pair.config, 1, MAX_LEN, CUDA, pair.dtype, False)
    ws = Workspace(CUDA)
    tokens = F.pad(pair.ids, (0, WIDTH)).int()
    Prefill(pair.weights, state, ws).prompt(0, tokens, 0, n)
    lanes = Lanes.make(1, state.null_slot, CUDA)
    lanes.join(0, 0, int(tokens[n]), n)
    lanes.tokens[0, :m] = tokens[n : n + m]
    one = Round(pair.weights, state, lanes, ws, m - 1, mtp=False)
    one.verify()
    at = n + rows
    found = Errors([])
    name = f"logits, {len(rows)} of {m} rows"
    found.add(name, one.logits[rows], pair.logits[at], pair.exact_logits[at])
    found.check(LOGITS_LIMIT[pair.dtype])
