"""What the toy server remembers: request numbers, counters, prefix cache, clock of its faults."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finalbench.testing.behaviour import Behaviour
from finalbench.testing.toy_model import EOS, MAX_LENGTH, VOCAB_SIZE, PseudoModel, prefix_state

CACHE_BLOCK = 16
PER_POSITION = 8
_STEP_MS = {"vk": 2.0, "vkae": 2.0, "vkue": 2.0, "stock": 10.0, "stock-compiled": 6.0}
_METRIC_NAMES = {
    "prompt_tokens": "prompt tokens processed",
    "generation_tokens": "tokens generated",
    "request_success": "requests that ended normally",
    "prefix_cache_queries": "prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "prompt tokens found in the prefix cache",
    "num_preemptions": "sequences preempted",
}


@dataclass
class Counters:
    """Totals since the start, under the names of /metrics without prefix."""

    plain: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_METRIC_NAMES, 0.0))
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_pos: list[int] = field(default_factory=lambda: [0] * PER_POSITION)
    running: int = 0
    waiting: int = 0


class ToyState:
    """One server process. `profile` decides the step time and whether drafts are refused."""

    def __init__(self, behaviour: Behaviour, profile: str, model: str) -> None:
        self.behaviour = behaviour
        self.profile = profile
        self.model = behaviour.model_name or model
        self.nonce = behaviour.nonce or os.environ.get("VK_NONCE", "")
        self.counters = Counters()
        alphabet = "newlines" if behaviour.newlines else "words"
        self.pseudo = PseudoModel(
            tie_every=behaviour.tie_every,
            alphabet="multibyte" if behaviour.multibyte else alphabet,
        )
        self.slots = asyncio.Semaphore(behaviour.slots)
        self.started = time.monotonic()
        self.requests = 0
        self.clients: set[tuple[str, int]] = set()
        self.digests: list[int] = []
        self.seen_shapes: set[int] = set()
        self.cached: set[int] = set()
        self.flushes_refused = 0
        self.slot_factor = 1.0 + self._slot_penalty()

    def _slot_penalty(self) -> float:
        """Counts starts in `slot_file`; the 1st, 3rd, ... start of a session is the slow one."""
        behaviour = self.behaviour
        if not behaviour.slot_bias or not behaviour.slot_file:
            return 0.0
        path = Path(behaviour.slot_file)
        starts = int(path.read_text()) if path.exists() else 0
        path.write_text(str(starts + 1))
        return behaviour.slot_bias if starts % 2 == 0 else 0.0

    @property
    def drafts_allowed(self) -> bool:
        return not self.profile.startswith("stock")

    def step_seconds(self, draft_tokens: int, request: int) -> float:
        """Time of one step of request number `request` (from 1), faults included, no jitter."""
        behaviour = self.behaviour
        base = behaviour.step_ms
        if base is None:
            base = _STEP_MS.get(self.profile, 5.0)
        base += behaviour.draft_ms * draft_tokens
        base *= self.slot_factor
        base *= 1.0 + behaviour.drift_per_request * (request - 1)
        base *= 1.0 + behaviour.drift_per_s * (time.monotonic() - self.started)
        return base / 1000.0

    def prefill_seconds(self, prompt: list[int], request: int) -> float:
        """Time to the first token; looks the prompt up in the cache and then stores it."""
        behaviour = self.behaviour
        milliseconds = behaviour.prefill_ms
        shape = len(prompt).bit_length()
        if behaviour.slow_first_ms and shape not in self.seen_shapes:
            self.seen_shapes.add(shape)
            milliseconds += behaviour.slow_first_ms
        milliseconds += behaviour.warm_decay_ms * 0.5 ** (request - 1)
        hits = self._cache_hits(prompt)
        per_token = behaviour.prefill_us_per_token / 1000.0
        milliseconds += per_token * (len(prompt) - hits + hits / behaviour.cache_speedup)
        return milliseconds * self.slot_factor / 1000.0

    def _cache_hits(self, prompt: list[int]) -> int:
        """Tokens of the longest cached prefix, in whole blocks of 16."""
        if not self.behaviour.cache:
            return 0
        state, hits, missing = 0, 0, False
        for start in range(0, len(prompt) - CACHE_BLOCK + 1, CACHE_BLOCK):
            state = prefix_state(prompt[start : start + CACHE_BLOCK], state)
            if state in self.cached and not missing:
                hits += CACHE_BLOCK
            else:
                missing = True
                if not self.behaviour.cache_forgets:
                    self.cached.add(state)
        self.counters.plain["prefix_cache_queries"] += len(prompt)
        self.counters.plain["prefix_cache_hits"] += hits
        return hits

    def flush(self) -> bool:
        """False while `flush_busy` refusals are left or requests run."""
        if self.flushes_refused < self.behaviour.flush_busy or self.counters.running:
            self.flushes_refused += 1
            return False
        self.cached.clear()
        return True

    def settings(self) -> dict[str, Any]:
        behaviour = self.behaviour
        return {
            "schema_version": 1,
            "profile": self.profile,
            "model": self.model,
            "weights": behaviour.weights,
            "model_digest": f"toy-{VOCAB_SIZE}-{behaviour.tokenizer}",
            "dtype": "float32",
            "device": "cpu",
            "device_name": "toy",
            "threads": 1,
            "graph_mode": "none",
            "kernel_fallbacks": [],
            "host_launch_us": None,
            "nonce": self.nonce,
            "max_model_len": MAX_LENGTH,
            "max_sequences": behaviour.slots,
            "prefix_caching": behaviour.cache,
            "sampler_defaults": {
                "temperature": 1.0,
                "top_k": behaviour.default_top_k,
                "top_p": 1.0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            },
            "draft_default": {"method": "none", "k": 0, "head_rows": None, "acceptance": None},
            "draft_methods": ["none", "mtp", "ngram"] if self.drafts_allowed else ["none"],
            "state_bytes_per_sequence": 0,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": [EOS],
            "versions": {"vkengine": "toy", "torch": None, "transformers": None, "triton": None},
        }

    def metrics_text(self) -> str:
        """Prometheus text; plain counters under `vk:`, the speculative ones under `vllm:`."""
        counters, lines = self.counters, []
        label = f'model_name="{self.model}",engine="0"'
        for name, help_text in _METRIC_NAMES.items():
            value = counters.plain[name]
            if name == "generation_tokens":
                value *= self.behaviour.counter_factor
            lines += [f"# HELP vk:{name} {help_text}", f"# TYPE vk:{name} counter"]
            lines.append(f"vk:{name}_total{{{label}}} {value}")
        for name, value in (("running", counters.running), ("waiting", counters.waiting)):
            lines.append(f"# TYPE vk:num_requests_{name} gauge")
            lines.append(f"vk:num_requests_{name}{{{label}}} {float(value)}")
        spec = "vllm:spec_decode_num_"
        lines.append(f"{spec}drafts_total{{{label}}} {float(counters.drafts)}")
        lines.append(f"{spec}draft_tokens_total{{{label}}} {float(counters.draft_tokens)}")
        lines.append(f"{spec}accepted_tokens_total{{{label}}} {float(counters.accepted)}")
        for position, value in enumerate(counters.accepted_per_pos):
            lines.append(
                f'{spec}accepted_tokens_per_pos_total{{{label},position="{position}"}} '
                f"{float(value)}"
            )
        return "\n".join(lines) + "\n"

    def stats(self) -> dict[str, Any]:
        """For tests: what really arrived. `digests` are CRCs of the prompts in order."""
        return {
            "requests": self.requests,
            "connections": len(self.clients),
            "digests": self.digests,
            "running": self.counters.running,
        }
