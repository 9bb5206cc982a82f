"""The engine on a GPU: the same requests and outputs, rounds as CUDA graphs.

Sequences that decode sit in the first lanes. A round of the graph kind takes its tokens,
positions, drafts and acceptance from the device and leaves a record of 16 integers per lane; the
host may launch the next round before it has read the last one. What the kernels cannot do (top-k,
top-p, min-p, penalties, bias, logprobs, drafts that the host proposes) runs between two graphs,
verify and finish, with torch on the device: the same tokens, one synchronisation a round.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from .engine import Engine
from .feed import Feed
from .gpu_flights import HEAD_ROWS, MAX_K, Flight, Flights
from .gpu_guided import GuidedRounds
from .gpu_prefill import Prefill
from .graph import Round
from .lanes import WIDTH, Lanes
from .output import Output
from .sampler import Sampler, logprobs_of
from .sampling import SamplingParams
from .sequence import Sequence
from .step import Model


class GpuEngine(Flights, GuidedRounds, Engine):
    """Same contract as :class:`~vkengine.engine.Engine`."""

    def __init__(self, model: Model, *, capture: tuple[int, ...], **kwargs: Any) -> None:
        mtp = model.weights.mtp is not None
        # The base class asks only whether there is a drafter; ours lives in the graphs.
        super().__init__(model, drafter=object() if mtp else None, **kwargs)  # type: ignore[arg-type]
        self.device = model.weights.embed.device
        self.lanes = Lanes.make(self.max_sequences, model.state.null_slot, self.device)
        self.views: dict[int, Lanes] = {}
        self.rounds: dict[tuple[int, int, bool, int | None], Round] = {}
        self.feed = Feed.make(model.weights, model.state, model.ws)
        self.prefill = Prefill(model.weights, model.state, model.ws)
        self.lane: list[Sequence] = []
        self.flights: list[Flight] = []
        self.limits: dict[str, int] = {}  # drafts that wait on the device, by request
        self.depths: dict[str, int] = {}  # what `auto` chose for the next round
        self.turn = 0  # rounds begun, as the lanes count them
        self.pairs = True  # two rounds may go as one graph
        self.launch_us = 0.0
        self.routing: list[float] = []
        began = time.monotonic()
        for k in capture:
            one = self._round(1, k, k > 0, HEAD_ROWS)
            one.capture()
            if not k and self.pairs:
                one.capture("twice")
        captured = time.monotonic()
        self.prefill.warm()
        warmed = time.monotonic()
        #: What the start spent its time on; compiling kernels for the first time is the most of it.
        self.load_s = {"graphs": captured - began, "prompt kernels": warmed - captured}
        if capture:
            self.launch_us = self._measure_launch(capture[0])

    def _measure_launch(self, k: int) -> float:
        """Host microseconds to launch one round's graph."""
        one = self._round(1, k, k > 0, HEAD_ROWS)
        moved = [*one.lanes.per_lane(), one.lanes.turn]
        kept = [t.clone() for t in moved]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            one.replay()
        spent = (time.perf_counter() - start) / 10
        torch.cuda.synchronize()
        for mine, old in zip(moved, kept, strict=True):
            mine.copy_(old)
        return spent * 1e6

    def _round(self, batch: int, k: int, mtp: bool, head_rows: int | None) -> Round:
        key = (batch, k, mtp, head_rows)
        if key not in self.rounds:
            if batch not in self.views:
                self.views[batch] = self.lanes.first(batch)
            m = self.model
            self.rounds[key] = Round(
                m.weights, m.state, self.views[batch], m.ws, k, head_rows, mtp=mtp
            )
        return self.rounds[key]

    # -- requests ---------------------------------------------------------------------------

    @torch.inference_mode()
    def add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        super().add(request_id, prompt_token_ids, params)
        p = self._running[request_id].sampler.processors
        for name in ("bias_ids", "bias", "banned_ids", "prompt_seen", "counts"):
            value = getattr(p, name)
            if value is not None:
                setattr(p, name, value.to(self.device))

    def _release(self, s: Sequence) -> None:
        if s in self.lane:
            self._leave(s)
        self.limits.pop(s.request_id, None)
        self.depths.pop(s.request_id, None)
        super()._release(s)

    @torch.inference_mode()
    def _leave(self, sequence: Sequence) -> None:
        """Close the gap: the last lane moves into the one that is left."""
        gap, last = self.lane.index(sequence), len(self.lane) - 1
        if gap != last:
            for t in self.lanes.per_lane():
                t[gap].copy_(t[last])
            self.lane[gap] = self.lane[last]
        self.lane.pop()
        self.lanes.leave(last, self.model.state.null_slot)

    # -- one step ---------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Prefill what waits, then a round; with kernels that need no host, one round ahead."""
        self._done = []
        waiting = [s for s in self._running.values() if s not in self.lane]
        if waiting:
            self._land_all()
            for s in waiting:
                self._admit(s)
        if not self.lane and not self.flights:
            return self._done
        if all(self._free_running(s) for s in self.lane):
            if not self.flights:
                self._launch()
            if self._worth_another():
                self._launch()
            self._land()
        else:
            self._land_all()
            if self.lane:
                self._guided_round()
        return self._done

    def _admit(self, s: Sequence) -> None:
        """Prefill all but the last prompt token; the first round runs that one."""
        n = len(s.prompt)
        padded = torch.tensor(s.prompt + [0] * WIDTH, dtype=torch.int32, device=self.device)
        if s.prompt_logprobs is not None:
            self._score_prompt(s, padded)
        else:
            self.prefill.prompt(s.slot, padded, 0, n - 1)
        s.position = n - 1
        stop_ids = s.sampler.processors.banned_ids
        banned = tuple(stop_ids.tolist()) if stop_ids is not None else ()
        self.lanes.join(
            len(self.lane),
            s.slot,
            s.prompt[-1],
            n - 1,
            seed=s.sampler.seed,
            choice=s.params.choice,
            temperature=s.params.temperature,
            acceptance=s.draft.acceptance,
            cap=MAX_K if s.auto is not None else self._depth(s),
            banned=banned if len(banned) <= 4 else (),
            ban_until=n + s.params.min_tokens if banned else 0,
        )
        self.limits[s.request_id] = 0
        self.lane.append(s)

    def _score_prompt(self, s: Sequence, tokens: Tensor) -> None:
        """Prompt log-probabilities, and the prompt's state with them."""
        for first, logits in self.feed.logits(s.slot, tokens, len(s.prompt) - 1):
            self._score(s, first, logits.cpu())

    def _depth(self, s: Sequence) -> int:
        if not s.draft.active:
            return 0
        if s.auto is not None:
            return min(self.depths.setdefault(s.request_id, s.auto.choose()), MAX_K)
        return min(int(s.draft.k), MAX_K)

    def _free_running(self, s: Sequence) -> bool:
        """Whether the kernels alone can choose this sequence's tokens and drafts."""
        p, params = s.sampler.processors, s.params
        plain = params.temperature == 0 or (
            params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0
        )
        few = p.banned_ids is None or len(p.banned_ids) <= 4
        own = s.ngram is None and s.oracle is None
        return (
            plain and few and own and not p.penalises and p.bias_ids is None
            and params.logprobs is None
        )  # fmt: skip

    def _current(self) -> Round:
        """The round for the lanes as they are."""
        batch = 1
        while batch < len(self.lane):
            batch *= 2
        batch = min(batch, self.max_sequences)
        depth = max(self._depth(s) for s in self.lane)
        mtp = any(s.draft.active and s.draft.method == "mtp" for s in self.lane)
        wanted = [s.draft.head_rows for s in self.lane if s.draft.head_rows is not None]
        return self._round(batch, depth, mtp and depth > 0, max(wanted, default=HEAD_ROWS))

    def _take(self, s: Sequence, proposed: int, tokens: list[int], logits: Tensor | None) -> None:
        if not tokens or min(tokens) < 0:
            self._fail(s)
            return
        if s.output:
            s.count(proposed, len(tokens) - 1)
            if s.auto is not None:
                self.depths[s.request_id] = s.auto.choose()
        s.position += len(tokens)
        kept = s.take(tokens)
        self._commit(s.sampler, kept)
        output = Output(s.request_id, kept, None)
        if s.params.logprobs is not None and logits is not None:
            output.logprobs = logprobs_of(logits[: len(kept)].cpu(), kept, s.params.logprobs)
        if s.prompt_logprobs is not None:
            output.prompt_logprobs, s.prompt_logprobs = s.prompt_logprobs, None
        self._done.append(output)
        if s.ngram is not None:
            s.ngram.extend(kept)
        if s.finish is not None:
            output.finish_reason, output.stop_reason = s.finish, s.stop_reason
            self._close(s, output)

    def _commit(self, sampler: Sampler, tokens: list[int]) -> None:
        sampler.generated += len(tokens)
        counts = sampler.processors.counts
        if counts is not None:
            ids = torch.tensor(tokens, device=self.device)
            counts.index_add_(0, ids, torch.ones(len(tokens), device=self.device))

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        found["graph_mode"] = "cuda_graph"
        found["host_launch_us"] = round(self.launch_us, 1)
        if self.routing:
            found["routing"] = {"distinct_experts": self.routing}
        return found

    def close(self) -> None:
        self._land_all()
        super().close()
