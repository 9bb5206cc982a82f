"""The stock baseline against bare transformers: same tokens, honest scores, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint
from transformers import AutoModelForCausalLM
from vkengine.bare import bare_loop
from vkengine.checkpoint import Builder
from vkengine.config import KNOWN_SHAPES
from vkengine.digest import model_digest
from vkengine.load import load_engine
from vkengine.output import Output
from vkengine.sampling import Draft, SamplingParams
from vkengine.stock import StockEngine
from vkengine.stock_model import StockLoadError, load_stock, text_config
from vkengine.stock_score import score_prompt

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[StockEngine]:
    engine = load_stock(str(folder), device="cpu", threads=1)
    yield engine
    engine.close()


def run(engine: StockEngine, prompt: list[int], **fields: Any) -> tuple[list[int], list[Output]]:
    engine.add("r", prompt, SamplingParams(**fields))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return [i for output in outputs for i in output.token_ids], outputs


def plain(engine: StockEngine, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = engine.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


def test_greedy_is_generate(engine: StockEngine) -> None:
    ids, outputs = run(engine, PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True)
    assert ids == plain(engine, PROMPT, max_new_tokens=12, do_sample=False)
    assert [len(output.token_ids) for output in outputs] == [1] * 12
    assert outputs[-1].finish_reason == "length"
    stats = outputs[-1].stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.completion_tokens, stats.drafts) == (5, 12, 0)


def test_every_sampler_field_reaches_generate(engine: StockEngine) -> None:
    fields = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    ids, _ = run(
        engine, PROMPT, **fields, repetition_penalty=1.2, max_tokens=12, seed=7, ignore_eos=True
    )
    torch.manual_seed(7)
    assert ids == plain(
        engine, PROMPT, **fields, repetition_penalty=1.2, max_new_tokens=12, do_sample=True
    )
    again, _ = run(
        engine, PROMPT, **fields, repetition_penalty=1.2, max_tokens=12, seed=7, ignore_eos=True
    )
    assert again == ids


def test_top_k_zero_means_off_not_fifty(engine: StockEngine) -> None:
    ids, _ = run(engine, PROMPT, temperature=5.0, max_tokens=40, seed=1, ignore_eos=True)
    torch.manual_seed(1)
    wide = plain(engine, PROMPT, temperature=5.0, top_k=0, max_new_tokens=40, do_sample=True)
    torch.manual_seed(1)
    narrow = plain(engine, PROMPT, temperature=5.0, top_k=50, max_new_tokens=40, do_sample=True)
    assert ids == wide != narrow


def test_choices_differ_under_one_seed(engine: StockEngine) -> None:
    draws = [run(engine, PROMPT, seed=3, choice=c, ignore_eos=True)[0] for c in range(3)]
    assert len({tuple(draw) for draw in draws}) == 3


def test_logit_bias(engine: StockEngine) -> None:
    fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    ids, _ = run(engine, PROMPT, **fields)
    banned, _ = run(engine, PROMPT, **fields, logit_bias=dict.fromkeys(ids, -100.0))
    assert not set(ids) & set(banned)


def test_stops(engine: StockEngine) -> None:
    fields = {"temperature": 0.0, "max_tokens": 12}
    ids, _ = run(engine, PROMPT, **fields, ignore_eos=True)
    end = next(i for i in range(2, 12) if ids[i] not in ids[:i])
    cut, outputs = run(engine, PROMPT, **fields, ignore_eos=True, stop_token_ids=(ids[end],))
    assert cut == ids[: end + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", ids[end])
    engine.eos_token_ids = frozenset({ids[end]})
    try:
        cut, outputs = run(engine, PROMPT, **fields)
        assert cut == ids[: end + 1]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
        later, _ = run(engine, PROMPT, **fields, min_tokens=end + 3)
        assert len(later) >= end + 3
        assert run(engine, PROMPT, **fields, ignore_eos=True)[0] == ids
    finally:
        engine.eos_token_ids = frozenset({0})


def test_logprobs_are_those_of_the_raw_logits(engine: StockEngine) -> None:
    ids, outputs = run(
        engine, PROMPT, temperature=0.3, top_k=2, seed=1, max_tokens=6, logprobs=3, ignore_eos=True
    )
    with torch.no_grad():
        logits = engine.model(torch.tensor([PROMPT + ids])).logits[0].float()
    expected = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    for row, output, token_id in zip(expected, outputs, ids, strict=True):
        (entry,) = output.logprobs or []
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("elements", [1 << 27, 700])
def test_prompt_scores(engine: StockEngine, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Whole, and with the head run over two positions at a time."""
    monkeypatch.setattr("vkengine.stock_score.SCORE_ELEMENTS", elements)
    prompt = [(i * 37) % 300 for i in range(40)]
    entries = score_prompt(engine.model, prompt, 2)
    with torch.no_grad():
        logits = engine.model(torch.tensor([prompt])).logits[0].float()
    assert entries[0] is None
    assert len(entries) == 40
    for position in range(1, 40):
        entry, row = entries[position], logits[position - 1]
        assert entry is not None
        assert entry.token_id == prompt[position]
        value = row[prompt[position]]
        assert entry.logprob + entry.logsumexp == pytest.approx(value.item(), abs=1e-4)
        assert entry.logsumexp == pytest.approx(row.logsumexp(-1).item(), abs=1e-4)
        assert entry.rank == 1 + (row > value).sum().item()
        assert entry.top[0][0] == row.argmax().item()


def test_generated_tokens_score_rank_one(engine: StockEngine) -> None:
    """Teacher forcing over prompt and output agrees with greedy decoding."""
    ids, _ = run(engine, PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True)
    _, outputs = run(engine, PROMPT + ids, max_tokens=1, prompt_logprobs=2)
    entries = outputs[0].prompt_logprobs
    assert entries is not None
    for entry in entries[len(PROMPT) :]:
        assert entry is not None
        assert entry.top[0][1] - entry.logprob < 1e-3


def test_what_generate_cannot_do_is_refused(engine: StockEngine) -> None:
    for fields, name in (
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"draft": Draft("mtp", 3)}, "draft"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"logit_bias": {320: 1.0}}, "logit_bias"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            engine.add("r", PROMPT, SamplingParams(**fields))
    assert not engine.has_work()


def test_first_in_first_out_and_abort(engine: StockEngine) -> None:
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    for name in ("a", "b", "c"):
        engine.add(name, PROMPT, params)
    assert engine.step()[0].request_id == "a"
    engine.abort("a")
    engine.abort("b")
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"c"}
    assert sum(len(output.token_ids) for output in outputs) == 100


def test_a_failing_request_leaves_the_engine_alive(
    engine: StockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "generate", fail)
        _, outputs = run(engine, PROMPT)
    assert outputs[-1].finish_reason == "error"
    assert "planted" in (outputs[-1].error or "")
    assert len(run(engine, PROMPT, max_tokens=3, ignore_eos=True)[0]) == 3


def test_bare_loop_counts_decode_only(engine: StockEngine) -> None:
    result = bare_loop(engine, prompt_tokens=8, output_tokens=12, repeat=3)
    assert result["tokens"] == 12
    assert len(result["decode_tok_s_repeats"]) == 3
    rates = sorted(result["decode_tok_s_repeats"])
    assert result["decode_tok_s"] == rates[1]
    assert result["decode_tok_s"] == pytest.approx(11 / result["seconds"])


def test_mtp_tensors_are_ignored(folder: Path, tmp_path: Path, engine: StockEngine) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "with-mtp"))
    tensors = load_file(copy / "model.safetensors")
    extra = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.norm.weight": torch.zeros(64)}
    save_file({**tensors, **extra}, copy / "model.safetensors", metadata={"format": "pt"})
    other = load_stock(str(copy), device="cpu", threads=1)
    try:
        fields = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
        assert run(other, PROMPT, **fields)[0] == run(engine, PROMPT, **fields)[0]
    finally:
        other.close()
    assert model_digest(copy) != model_digest(folder)
    assert model_digest(folder) == model_digest(folder)


def _damaged(folder: Path, target: Path, kind: str) -> Path:
    copy = Path(shutil.copytree(folder, target))
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.gate.weight"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "cut header":
        weights.write_bytes(weights.read_bytes()[:50])
    elif kind == "no file":
        weights.unlink()
    elif kind == "missing tensor":
        del tensors[name]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif kind == "wrong shape":
        tensors[name] = tensors[name][:, :5].contiguous()
        save_file(tensors, weights, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", "model.safetensors is truncated"),
        ("cut header", "model.safetensors is truncated"),
        ("no file", "no safetensors file"),
        ("missing tensor", "layers.1.mlp.gate.weight"),
        ("wrong shape", "layers.1.mlp.gate.weight"),
    ],
)
def test_a_damaged_checkpoint_is_named(folder: Path, tmp_path: Path, kind: str, words: str) -> None:
    copy = _damaged(folder, tmp_path / "bad", kind)
    with pytest.raises(StockLoadError) as refused:
        load_stock(str(copy), device="cpu", threads=1)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(StockLoadError, match="no checkpoint 'nowhere'"):
        load_stock("nowhere", device="cpu")


def test_random_weights_are_those_of_the_engine() -> None:
    """Both arms hold the same numbers, so greedy tokens agree; another seed gives others."""
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    tokens = {}
    for seed in (3, 4):
        stock = load_stock("vk-tiny", weights=f"random:{seed}", device="cpu", threads=1)
        tokens[seed] = run(stock, PROMPT, **greedy)[0]
        assert stock.settings()["weights"] == f"random:{seed}"
        stock.close()
    ours = load_engine("vk-tiny", weights="random:3", device="cpu", threads=1)
    ours.add("r", PROMPT, SamplingParams(**greedy))
    made = []
    while ours.has_work():
        made += [i for output in ours.step() for i in output.token_ids]
    ours.close()
    assert made == tokens[3] != tokens[4]


@pytest.mark.parametrize("name", sorted(KNOWN_SHAPES))
def test_known_shapes_are_what_transformers_builds(name: str) -> None:
    """Every parameter is one the engine's loader asks for, with the same shape."""
    shape = KNOWN_SHAPES[name]
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(text_config(shape))
    theirs = {n: tuple(p.shape) for n, p in built.named_parameters()}
    ours: dict[str, tuple[int, ...]] = {}

    def record(name: str, size: tuple[int, ...]) -> torch.Tensor:
        ours[name] = size
        return torch.empty(size, device="meta")

    meta = torch.device("meta")
    empty = torch.empty(0, device="meta")
    Builder(shape, record, meta, torch.bfloat16, empty, empty).model("model.", mtp=False)
    assert theirs == ours


def test_random_weights_need_a_seed() -> None:
    with pytest.raises(StockLoadError, match="random:SEED"):
        load_stock("vk-tiny", weights="random", device="cpu")


def test_a_static_cache_changes_no_token(folder: Path, engine: StockEngine) -> None:
    fields = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    static = load_stock(str(folder), device="cpu", threads=1, compiled=True)
    try:
        assert run(static, PROMPT, **fields)[0] == run(engine, PROMPT, **fields)[0]
        assert static.settings()["profile"] == "stock-compiled"
        assert static.settings()["graph_mode"] == "eager, static cache"  # nothing compiles here
    finally:
        static.close()
