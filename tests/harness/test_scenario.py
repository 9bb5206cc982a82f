"""Scenarios: what ships is valid, what is wrong is named with its place and the nearest key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finalbench.errors import UsageError
from finalbench.scenario import (
    Scenario,
    find_scenario,
    load_scenario,
    parse_override,
    scenario_files,
)

CLAIMED = ("qwen35-35b-a3b", "darwin-36b-opus", "jgos-398b", "gemma4-e4b", "qwen36-27b")


@pytest.mark.parametrize("name", ["vk-tiny", *CLAIMED])
def test_shipped_scenarios_are_valid(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == scenario.model.name == name
    assert scenario.measure.blocks >= 3


def test_every_sampler_field_is_written_out() -> None:
    for path in scenario_files().values():
        samplings = load_scenario(str(path)).samplings
        text = path.read_text(encoding="utf-8")
        for sampling in samplings.values():
            for field in sampling.fields():
                assert text.count(f"    {field}:") == len(samplings), f"{path.name}: {field}"


def test_bytes_per_token_are_the_published_ones() -> None:
    expected = {"qwen35-35b-a3b": 5.893, "qwen36-27b": 51.249, "jgos-398b": 32.664}
    for name, gigabytes in expected.items():
        assert load_scenario(name).model.bytes_per_token / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_facts_of_the_shipped_model_are_those_of_its_config() -> None:
    folder = Path(__file__).parents[2] / "engine" / "models" / "vk-tiny"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    facts = load_scenario("vk-tiny").model.facts
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv, dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    v_heads, v_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    k_width = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    full = layers // config["full_attention_interval"]
    linear = layers - full
    width = 2 * k_width + v_heads * v_dim
    gdn = hidden * (width + 2 * v_heads * v_dim + 2 * v_heads)
    gdn += width * config["linear_conv_kernel_dim"] + 2 * v_heads + v_dim
    attention = hidden * dim * (2 * heads + 2 * kv + heads) + 2 * dim
    expert = 3 * hidden * config["moe_intermediate_size"]
    shared = 3 * hidden * config["shared_expert_intermediate_size"]
    router = hidden * (config["num_experts"] + 1)
    active = router + shared + config["num_experts_per_tok"] * expert
    whole = router + shared + config["num_experts"] * expert
    table = config["vocab_size"] * hidden
    norms = 2 * hidden
    body = linear * gdn + full * attention + layers * norms + hidden
    draft = 2 * hidden * hidden + 3 * hidden + attention + norms
    embedding = table if config["tie_word_embeddings"] else 2 * table
    assert facts.params_per_token == body + layers * active + table
    assert facts.params_per_draft == draft + active + table
    assert facts.params_total == body + layers * whole + embedding + draft + whole
    assert facts.params_per_expert == expert
    assert facts.kv_elements_per_token == full * 2 * kv * dim
    assert facts.state_bytes_per_sequence == linear * v_heads * v_dim * v_dim * 4
    assert (facts.layers, facts.experts, facts.experts_per_token) == (
        layers,
        config["num_experts"],
        config["num_experts_per_tok"],
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("axes.seq_lem=[1]", "axes.seq_lem: unknown key; the nearest valid one is axes.seq_len"),
        ("bas.seq_len=1", "bas: unknown key; the nearest valid one is base"),
        ("samplings.t07.top_q=1", "the nearest valid one is samplings.t07.top_p"),
        ("model.facts.layer=3", "the nearest valid one is model.facts.layers"),
        ("drafts.mtp1.depth=3", "drafts.mtp1.depth: unknown key"),
        ("axes.seq_len=[0]", "axes.seq_len.0: input should be greater than 0, not 0"),
        ("axes.seq_len=[128]", "base.seq_len: 512 is not in axes.seq_len [128]"),
        ("axes.seq_len=[512,4090]", "exceed the model's context of 4096"),
        ("axes.seq_len=[512,512]", "axes.seq_len: values repeat"),
        ("axes.draft=[mtp3,foo]", "axes.draft: 'foo' is not defined"),
        ("drafts.mtp1.k=9", "drafts.mtp1.k: input should be less than or equal to 8, not 9"),
        ("drafts.mtp1.k=0", "drafts.mtp1.k: method mtp needs k of 1 to 8"),
        ("model.mtp=absent", "axes.draft: the model has no MTP layer"),
        ("measure.blocks=true", "measure.blocks: input should be a valid integer, not True"),
        ("measure.blocks='3'", "measure.blocks: input should be a valid integer, not '3'"),
        ("baseline=vllm", "baseline: vllm is not among arms"),
        ("serving.weights=random", "serving.weights"),
        ("workload.requests=", "workload.requests: input should be a valid integer, not None"),
    ],
)
def test_errors_name_the_place_and_the_nearest_key(override: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_scenario("vk-tiny", [parse_override(override)])
    assert expected in str(caught.value)
    # A fault that shows only between two keys is reported at the other one, in the file.
    assert f"--set {override}" in str(caught.value) or "vk-tiny.yaml:" in str(caught.value)
    assert "\n" not in str(caught.value)


def write_variant(folder: Path, old: str, new: str) -> str:
    text = find_scenario("vk-tiny").read_text(encoding="utf-8")
    assert old in text
    path = folder / "mine.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("  seq_len: [128", "  seq_lens: [128", "mine.yaml:LINE: axes.seq_lens: unknown key"),
        ("  requests: 6", "  requests: 6\n  requests: 7", "'requests' is given twice"),
        ("  ignore_eos: true", "  ignore_eos: no", "ignore_eos: input should be a valid boolean"),
        ("schema_version: 1", "schema_version: 2", "mine.yaml:LINE: schema_version"),
        ("axes:", "axes: [", "mine.yaml:"),
        ("family: qwen3_5_moe", "family: 012", "family: input should be a valid string, not 12"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = write_variant(tmp_path, old, new)
    line = Path(path).read_text(encoding="utf-8").partition(new)[0].count("\n") + 1
    with pytest.raises(UsageError) as caught:
        load_scenario(path)
    assert expected.replace("LINE", str(line)) in str(caught.value)


def test_yaml_1_1_traps_are_read_by_the_1_2_rules(tmp_path: Path) -> None:
    name = write_variant(tmp_path, "request_timeout_s: 120.0", "request_timeout_s: 1.2e2")
    assert load_scenario(name).measure.request_timeout_s == 120
    name = write_variant(tmp_path, "request_timeout_s: 120.0", "request_timeout_s: 1e2")
    assert load_scenario(name).measure.request_timeout_s == 100
    name = write_variant(tmp_path, "title: vk-tiny", "title: no")
    assert load_scenario(name).title.startswith("no on")
    name = write_variant(tmp_path, "request_timeout_s: 120.0", "request_timeout_s: 3:30")
    with pytest.raises(UsageError, match="'3:30'"):
        load_scenario(name)


def test_overrides_are_yaml_and_later_ones_win() -> None:
    overrides = [parse_override(o) for o in ("measure.blocks=2", "measure.blocks=4", "grid=full")]
    scenario = load_scenario("vk-tiny", overrides)
    assert (scenario.measure.blocks, scenario.grid) == (4, "full")


@pytest.mark.parametrize("text", ["blocks", "=3", "a..b=1", "x=[1"])
def test_malformed_override(text: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        parse_override(text)


def test_unknown_model_names_the_nearest_and_lists_all() -> None:
    with pytest.raises(UsageError) as caught:
        find_scenario("qwen35-35b-a3")
    assert "did you mean qwen35-35b-a3b?" in str(caught.value)
    assert "vk-tiny" in str(caught.value.hint)


def test_hash_is_identity_of_what_is_measured() -> None:
    base = load_scenario("vk-tiny")
    same = load_scenario(
        "vk-tiny", [parse_override("title=other"), parse_override("model.path=/somewhere")]
    )
    other = load_scenario("vk-tiny", [parse_override("samplings.t07.top_p=0.8")])
    assert base.hash() == same.hash()
    assert base.hash() != other.hash()


def test_json_round_trip() -> None:
    scenario = load_scenario("qwen35-35b-a3b")
    assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario


def test_what_came_later_changes_no_identity_until_it_is_set() -> None:
    def scenario(*overrides: str) -> Scenario:
        return load_scenario("vk-tiny", [parse_override(text) for text in overrides])

    plain = scenario("workload.warmup_rounds=null")
    assert plain.workload.identity().keys() == {
        "text_class",
        "domains",
        "requests",
        "warmup_requests",
        "warmup_output_len",
        "ignore_eos",
        "seed",
    }
    changes = (
        "workload.warmup_rounds=5",
        "workload.limits={ttft_s: 1.0}",
        "workload={arrivals: poisson, rate_per_s: 3, requests: 4}",
    )
    hashes = {plain.hash(), *(scenario(text).hash() for text in changes)}
    assert len(hashes) == 4
    assert scenario("workload.warmup_rounds=null", "workload.limits=null").hash() == plain.hash()


@pytest.mark.parametrize("fields", ["arrivals=poisson", "rate_per_s=5"])
def test_an_open_loop_needs_its_rate_and_a_closed_one_has_none(fields: str) -> None:
    with pytest.raises(UsageError, match="rate_per_s"):
        load_scenario("vk-tiny", [parse_override(f"workload.{fields}")])
