"""Plants a fault for each case id of the engine and looks that its test fails.

The tree is copied to a temporary folder; nothing is changed in place. `python tests/planted.py`
runs all of them (about ten seconds each), `python tests/planted.py E10 E65` some. Exit 1 when a
fault goes unseen, or when its text is no longer in the source.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import hypothesis  # noqa: F401
import pytest
import torch
import transformers.models.qwen3_5_moe  # noqa: F401
import uvicorn  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """`old` becomes `new` in `file` (under engine/vkengine); `test` (under tests) must fail."""

    cases: str
    says: str
    file: str
    old: str
    new: str
    test: str


_LOGITS = "    return logits_of(h, model.weights)\n"
_LAST = "{}, self.model.weights)\n            if not"
_SKIP = "            s.position += verdict.accepted + 1\n"
_CONTENT = "test_step_exact.py::test_e70_a_neighbours_content_changes_no_bit"
FAULTS = (
    Fault(
        "E01 E02", "rejected drafts stay in the state", "engine.py",
        _SKIP, "            s.position += len(s.drafts) + 1\n",
        "test_step_exact.py::test_e01_drafts_only_now_and_then",
    ),
    Fault(
        "E02", "live rows write the stored state: the fold moves past what was accepted", "step.py",
        "CPU_FOLD = 8", "CPU_FOLD = 1",
        "test_state_rollback.py::test_e02_state_after_accept_j_is_that_of_j_single_steps",
    ),
    Fault(
        "E02", "the rings hold the window and half of the drafts", "state.py",
        "RING = 16", "RING = 8",
        "test_state_rollback.py::test_e02_state_after_accept_j_is_that_of_j_single_steps",
    ),
    Fault(
        "E04", "one draft too many counts as accepted", "step.py",
        "        if not good:\n            break", "        if not good:\n            return n + 1",
        "test_step_exact.py::test_oracle_with_every_accept_length",
    ),
    Fault(
        "E05 E100", "the first draft's input depends on the depth", "engine.py",
        "rows = hidden[: len(tokens)]", "rows = hidden[: len(tokens)] * (1 - k)",
        "test_step_exact.py::test_e05_e100_first_position_does_not_depend_on_depth",
    ),
    Fault(
        "E06", "k auto does not learn from failures", "draft/auto.py",
        "range(min(accepted + 1, proposed))", "range(accepted)",
        "test_engine_requests.py::test_e06_zero_acceptance_ends_in_plain_decoding",
    ),
    Fault(
        "E10", "a slot is handed on as it was", "state.py",
        "            part[:, slot].zero_()", "            pass",
        "test_state_rollback.py::test_e10_slot_reuse_leaves_nothing_behind",
    ),
    Fault(
        "E13", "a first unit is taken to be full", "engine.py",
        _LAST.format("h[-1:]"), _LAST.format("h[:1]"),
        "test_step_exact.py::test_e13_short_prompts",
    ),
    Fault(
        "E14 E70", "every lane reads the first lane's rows", "step.py",
        "start = b * m", "start = 0",
        "test_step_exact.py::test_e14_e70_alone_equals_among_others",
    ),
    Fault(
        "E16", "a state that is not finite goes on", "step.py",
        "finite = healthy or bool(torch.isfinite(hidden[start:end].sum()))", "finite = True",
        "test_state_rollback.py::test_e16_not_finite_state_ends_the_request_with_an_error",
    ),
    Fault(
        "E16", "an abort keeps its slot", "engine.py",
        "        self._free.append(s.slot)\n", "        self._free.insert(0, 0)\n",
        "test_engine_soak.py::test_state_machine_short",
    ),
    Fault(
        "E24", "a round writes into slot 0", "step.py",
        "[(lane.slot, lane.position) for lane in lanes]", "[(0, lane.position) for lane in lanes]",
        "test_state_rollback.py::test_e24_other_slots_keep_their_bytes",
    ),
    Fault(
        "E32 E33 E34", "weaker noise than Gumbel's", "sampler.py",
        "x = x + torch.stack(", "x = x + 0.9 * torch.stack(",
        "test_sampling_rules.py::test_e32_e33_e34_distribution_of_200000_draws",
    ),
    Fault(
        "E36", "noise at temperature 0", "sampler.py",
        "        if p.temperature > 0:\n            rows", "        if True:\n            rows",
        "test_sampling_rules.py::test_e36_temperature_zero_is_one_hot",
    ),
    Fault(
        "E42 E44", "a nucleus may be empty", "ops/sample/reference.py",
        "    inside[:, 0] = True\n", "    inside[:, 0] = False\n",
        "test_sampling_rules.py::test_e42_e44_odd_rows_give_valid_ids",
    ),
    Fault(
        "E45", "the bias reaches the first row of a round only", "ops/sample/reference.py",
        "x[:, p.bias_ids] += p.bias", "x[:1, p.bias_ids] += p.bias",
        "test_engine_requests.py::test_e45_a_bias_reaches_every_row_of_a_round",
    ),
    Fault(
        "E46 E49 E98", "the last token counts twice", "sampler.py",
        "torch.ones(len(tokens)))", "2 * torch.ones(len(tokens)))",
        "test_engine_requests.py::test_e46_e49_e98_penalties_count_each_token_once",
    ),
    Fault(
        "E46 E49 E98", "of several tokens the last alone is counted", "sampler.py",
        "torch.tensor(tokens), torch.ones(len(tokens))", "torch.tensor(tokens[-1:]), torch.ones(1)",
        "test_engine_requests.py::test_e46_e49_e98_penalties_count_each_token_once",
    ),
    Fault(
        "E09", "dummy rows take the last real slot", "step.py",
        "[(lane.slot, lane.position) for", "[(min(lane.slot, 7), lane.position) for",
        "test_cases_parts.py::test_e09_padded_rows_write_to_the_null_slot_alone",
    ),
    Fault(
        "E12 E50 E52 E53", "unknown fields are ignored", "server/protocol.py",
        'extra="forbid"', 'extra="ignore"',
        "test_server_clients.py::test_e12_e50_e52_e53_what_is_not_there_is_refused",
    ),
    Fault(
        "E17", "a missing draft layer is found in the first request", "load.py",
        "parameters.mtp is None:", "False:",
        "test_checkpoint_files.py::test_any_missing_mtp_tensor_refuses_drafting",
    ),
    Fault(
        "E38", "temperature is left out", "ops/sample/reference.py",
        "x = x / p.temperature", "x = x / 1.0",
        "test_sampling_rules.py::test_e32_e33_e34_distribution_of_200000_draws",
    ),
    Fault(
        "E38", "penalties are left out", "ops/sample/reference.py",
        "x = penalise(x, p, drafts)", "pass",
        "test_sampling_rules.py::test_e32_e33_e34_distribution_of_200000_draws",
    ),
    Fault(
        "E40", "every lane draws with the first lane's key", "step.py",
        "else lane.sampler.choose(", "else lanes[0].sampler.choose(",
        "test_step_exact.py::test_e14_e70_alone_equals_among_others",
    ),
    Fault(
        "E41", "drafts are the likeliest tokens instead of draws", "draft/mtp.py",
        "sampler.choose(logits, at + 2, drafts, ahead=len(drafts))", "[int(torch.argmax(logits))]",
        "test_draft_coupling.py::test_e41_acceptance_is_the_expected_one",
    ),
    Fault(
        "E61", "the count of tokens is one too high", "server/render.py",
        "completion = sum(", "completion = 1 + sum(",
        "test_server_openai.py::test_completion_and_stream_agree",
    ),
    Fault(
        "E66", "a norm adds in another order for even row counts", "ops/norm/cpu.py",
        "torch.linalg.vector_norm(x,",
        "torch.linalg.vector_norm(x if x.shape[0] % 2 else x.flip(-1),",
        "test_cases_parts.py::test_e66_a_norm_adds_in_one_order_for_every_row_count",
    ),
    Fault(
        "E68", "an expert row sees the others", "ops/moe/cpu.py",
        "h += p.down.apply(b.act)", "h += p.down.apply(b.act) + 1e-6 * b.act.mean()",
        "test_cases_parts.py::test_e68_e80_expert_rows_do_not_depend_on_each_other",
    ),
    Fault(
        "E69", "a product depends on the row count", "ops/linear/packed.py",
        "return self.run(x, self.data)", "return self.run(x, self.data) * (1 + 1e-6 * x.shape[0])",
        "test_cases_parts.py::test_e69_a_product_does_not_depend_on_the_row_count",
    ),
    Fault(
        "E74 E76", "state in half precision", "state.py",
        "kind: torch.dtype = torch.float32", "kind: torch.dtype = torch.float16",
        "test_cases_parts.py::test_e74_e76_state_gates_norms_and_router_are_fp32",
    ),
    Fault(
        "E77", "a row of NaN names an expert that is not there", "ops/moe/reference.py",
        "return ids[:, :k],", "return ids[:, :k] + 100 * probs.isnan().any(-1, keepdim=True),",
        "test_cases_parts.py::test_e77_expert_ids_are_valid_for_every_row",
    ),
    Fault(
        "E78", "ids by number, weights by rank", "ops/moe/reference.py",
        "return ids[:, :k],", "return ids[:, :k].sort(-1).values,",
        "test_cases_parts.py::test_e78_ids_and_weights_for_every_number_of_experts",
    ),
    Fault(
        "E80", "rows beyond the first group are not visited", "ops/moe/cpu.py",
        "h += p.down.apply(b.act)", "h[:8] += p.down.apply(b.act)[:8]",
        "test_cases_parts.py::test_e68_e80_expert_rows_do_not_depend_on_each_other",
    ),
    Fault(
        "E82", "the shares of the launch before stay", "ops/moe/cpu.py",
        "b.routed.zero_()", "b.routed",
        "test_cases_parts.py::test_e82_a_second_launch_and_a_zero_block_are_like_the_first",
    ),
    Fault(
        "E85", "ids beyond a pruned head may be drafted", "draft/mtp.py",
        'value=float("-inf")', "value=9.0",
        "test_cases_parts.py::test_e85_a_pruned_head_proposes_only_its_ids",
    ),
    Fault(
        "E85", "a pruned head holds the last ids", "draft/mtp.py",
        "pack(self.head[:rows])", "pack(self.head[-rows:])",
        "test_model_mtp.py::test_pruned_head_scores_its_rows_alone",
    ),
    Fault(
        "E86", "drafts that fail are never switched off", "draft/auto.py",
        "best, best_rate = 0, 1.0", "best, best_rate = 1, 1.0",
        "test_engine_requests.py::test_auto_k_follows_acceptance",
    ),
    Fault(
        "E89", "k = 0 drafts all the same", "sampling.py",
        'self.method != "none" and self.k != 0', 'self.method != "none"',
        "test_step_exact.py::test_e89_no_drafts_asked_for_is_no_drafting",
    ),
    Fault(
        "E96", "rounds are not counted", "sequence.py",
        "stats.draft_tokens += proposed", "stats.draft_tokens += 0",
        "test_engine_requests.py::test_last_output_carries_reason_and_counts",
    ),
    Fault(
        "E100", "the drafter stops at five", "draft/mtp.py",
        "if len(drafts) == k:", "if len(drafts) == min(k, 5):",
        "test_step_exact.py::test_e05_e100_first_position_does_not_depend_on_depth",
    ),
    Fault(
        "E48", "rows do not count the drafts before them", "ops/sample/reference.py",
        "        counts[j + 1 :, token] += 1.0\n", "        pass\n",
        "test_sampling_rules.py::test_e48_each_row_counts_its_own_prefix",
    ),
    Fault(
        "E54 E56", "the rest of a round follows its stop", "sequence.py",
        "if token in params.stop_token_ids else None\n                break\n",
        "if token in params.stop_token_ids else None\n",
        "test_engine_requests.py::test_e54_e56_stop_inside_a_round_cuts_there",
    ),
    Fault(
        "E57", "each token is decoded by itself", "tokenizer.py",
        "data = self._rest + self._bytes(token_id)", "data = self._bytes(token_id)",
        "test_server_text.py::test_split_characters_come_whole_e57",
    ),
    Fault(
        "E57", "a stop string is looked for in single pieces", "server/stops.py",
        "text = self._held + piece", 'text, self._held = piece, ""',
        "test_server_text.py::test_stop_strings_do_not_depend_on_pieces_e57",
    ),
    Fault(
        "E58", "the tail is not flushed", "tokenizer.py",
        "return codecs.utf_8_decode(rest,", 'return "" and codecs.utf_8_decode(rest,',
        "test_server_text.py::test_the_tail_is_flushed_e58",
    ),
    Fault(
        "E62", "one draft too many counts as accepted, in a chat", "step.py",
        "        if not good:\n            break", "        if not good:\n            return n + 1",
        "test_server_engine.py::test_chat_drafts_change_no_token_e62",
    ),
    Fault(
        "E60", "log-probabilities of the first token only", "engine.py",
        "logprobs_of(logits[: len(kept)], kept,", "logprobs_of(logits[:1], kept[:1],",
        "test_engine_requests.py::test_e60_one_logprob_entry_per_token",
    ),
    Fault(
        "E64", "a row's result depends on the number of rows", "step.py",
        _LOGITS, "    h = h * (1 + 1e-6 * rows.m)\n" + _LOGITS,
        "test_step_exact.py::test_e64_row_bits_for_every_round_size",
    ),
    Fault(
        "E70", "a row sees its neighbours", "step.py",
        _LOGITS, "    h = h + 1e-4 * h.mean(0)\n" + _LOGITS,
        _CONTENT,
    ),
    Fault(
        "E65", "ties go to the highest id", "sampler.py",
        "return torch.argmax(logits, dim=-1).tolist()",
        "return (logits.shape[-1] - 1 - torch.argmax(logits.flip(-1), dim=-1)).tolist()",
        "test_sampling_rules.py::test_e65_ties_go_to_the_lowest_id",
    ),
    Fault(
        "E72 E73", "decays multiply up from the start of the chunk", "prefill.py",
        "log_decay.cumsum(-1)", "log_decay.clamp(min=-1.0).cumsum(-1)",
        "test_state_rollback.py::test_e72_e73_chunk_form_equals_the_recurrence",
    ),
    Fault(
        "E84", "an MTP layer of another kind passes", "checkpoint.py",
        "if not name.startswith(SKIPPED_PREFIXES):",
        'if not name.startswith((*SKIPPED_PREFIXES, "mtp.")):',
        "test_checkpoint_files.py::test_e84_the_mtp_layers_kind_must_match",
    ),
    Fault(
        "E97", "negative ids pass", "engine.py",
        "if not 0 <= token < self.vocab_size:", "if token >= self.vocab_size:",
        "test_engine_requests.py::test_e97_bad_requests_are_refused_before_they_run",
    ),
    Fault(
        "E101", "the size at start leaves the draft layer out", "state.py",
        "(1 if config.mtp_layers else 0)", "0",
        "test_state_rollback.py::test_e101_state_size_is_known_at_start",
    ),
    Fault(
        "E08", "a round reads scratch that nothing wrote", "step.py",
        _LOGITS, "    h = h + model.ws.get('stale', (h.shape[1],))\n" + _LOGITS,
        "test_step_exact.py::test_e08_poisoned_scratch_changes_nothing",
    ),
)  # fmt: skip


def seen(fault: Fault, tree: Path) -> str:
    """`failed` when the test saw the fault; else what happened instead."""
    file = tree / "engine" / "vkengine" / fault.file
    before = file.read_text("utf-8")
    if fault.old not in before:
        return "the text is gone"
    file.write_text(before.replace(fault.old, fault.new), "utf-8")
    try:
        if (child := os.fork()) == 0:
            code = 9
            try:
                code = _run(fault.test, tree)
            finally:  # nothing of the parent's may run in the child, its clean-up least of all
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        file.write_text(before, "utf-8")
    return {0: "PASSED", 1: "failed", 5: "no such test"}.get(code, f"exit {code}")


def _run(test: str, tree: Path) -> int:
    """pytest's exit code, in a child that has the slow imports from its parent but none of ours."""
    signal.alarm(300)
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    os.chdir(tree)
    sys.path[:0] = [str(tree / "engine"), str(tree)]
    sys.dont_write_bytecode = True
    options = ["-m", "not nightly", "-x", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    return int(pytest.main([*options, f"tests/engine/{test}"]))


def main(wanted: list[str]) -> int:
    unseen = 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignore = shutil.ignore_patterns(".venv", ".git", "results", ".hypothesis", "__pycache__")
        shutil.copytree(ROOT, tree, ignore=ignore)
        for fault in FAULTS:
            if wanted and not set(wanted) & set(fault.cases.split()):
                continue
            found = seen(fault, tree)
            unseen += found != "failed"
            sys.stdout.write(f"| {fault.cases} | {fault.says} | `{fault.test}` | {found} |\n")
            sys.stdout.flush()
    return min(unseen, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
