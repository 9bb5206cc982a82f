"""The stock baseline: transformers' own `generate`, eager, behind the same API as our engine.

One sequence at a time, in order of arrival. `generate` runs in a thread of its own and hands each
token over through a queue; nothing of ours runs inside its loop.
"""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from .output import Output, RequestStats, TokenLogprobs
from .sampling import SamplingParams
from .stock_score import capped_logits, score_prompt, score_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# An odd constant keeps (seed, choice) pairs apart in the one seed that torch takes.
_CHOICE_STRIDE = 0x9E3779B97F4A7C15
_KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}


class _Aborted(Exception):
    """Leaves `generate` from inside its streamer."""


@dataclass(slots=True)
class _Job:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    aborted: bool = False


class StockEngine:
    """The Engine API over `generate`. `step` blocks until the next token."""

    max_sequences = 1

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        model_name: str,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        weights: str = "real",
        threads: int | None = None,
        compiled: bool = False,
    ) -> None:
        """`compiled`: a static cache, which transformers compiles for where it can (on a GPU)."""
        self.profile = "stock-compiled" if compiled else "stock"
        self.cache = "static" if compiled else None
        text = model.config.get_text_config(decoder=True)
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.vocab_size: int = text.vocab_size
        self.eos_token_ids = eos_token_ids
        self.model = model.eval()
        # An empty config: every field then comes from the request, none from the checkpoint.
        self.model.generation_config = GenerationConfig()
        self._weights = weights
        self._threads = threads
        self._jobs: dict[str, _Job] = {}
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._outbox: SimpleQueue[Output] = SimpleQueue()
        self._tokens = {"prompt": 0, "generation": 0}
        self._thread = threading.Thread(target=self._work, name="stock-generate", daemon=True)
        self._thread.start()

    def add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises ValueError naming a field that `generate` cannot honour."""
        _check(params, self.vocab_size)
        if len(prompt_token_ids) + params.max_tokens > self.max_model_len:
            raise ValueError(f"max_tokens: prompt and output exceed {self.max_model_len} tokens")
        seed = torch.seed() & (2**63 - 1) if params.seed is None else params.seed
        job = _Job(request_id, prompt_token_ids, params, seed)
        self._jobs[request_id] = job
        self._inbox.put(job)

    def abort(self, request_id: str) -> None:
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.aborted = True

    def has_work(self) -> bool:
        return bool(self._jobs)

    def progress(self, _request_id: str) -> None:
        """Nothing drafts here."""

    def step(self) -> list[Output]:
        if not self._jobs:
            return []
        outputs = [self._outbox.get()]
        while True:
            try:
                outputs.append(self._outbox.get_nowait())
            except Empty:
                break
        live = [output for output in outputs if output.request_id in self._jobs]
        for output in live:
            self._tokens["generation"] += len(output.token_ids)
            if output.finish_reason is not None:
                self._tokens["prompt"] += len(self._jobs.pop(output.request_id).prompt)
        return live

    def settings(self) -> dict[str, Any]:
        parameter = next(self.model.parameters())
        cuda = parameter.device.type == "cuda"
        return {
            "schema_version": 1,
            "profile": self.profile,
            "model": self.model_name,
            "weights": self._weights,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": parameter.device.type,
            "device_name": torch.cuda.get_device_name() if cuda else None,
            "threads": torch.get_num_threads(),
            "graph_mode": ("compiled" if cuda else "eager, static cache")
            if self.cache
            else "eager",
            "attention": self.model.config._attn_implementation,
            "kernel_fallbacks": [
                f"{name} is not installed"
                for module, name in _KERNELS.items()
                if importlib.util.find_spec(module) is None
            ],
            "host_launch_us": None,
            "max_model_len": self.max_model_len,
            "max_sequences": self.max_sequences,
            "draft_default": {"method": "none", "k": 0, "head_rows": None, "acceptance": None},
            "draft_methods": ["none"],
            "state_bytes_per_sequence": None,
        }

    def counters(self) -> dict[str, float | list[float]]:
        return {}

    def close(self) -> None:
        for job in self._jobs.values():
            job.aborted = True
        self._jobs.clear()
        self._inbox.put(None)
        self._thread.join(30)

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while (job := self._inbox.get()) is not None:
            if job.aborted:
                continue
            try:
                self._serve(job)
            except _Aborted:
                continue
            except Exception as error:  # noqa: BLE001 (one request fails, the server stays)
                message = f"{type(error).__name__}: {error}"
                self._outbox.put(Output(job.request_id, [], finish_reason="error", error=message))

    @torch.no_grad()
    def _serve(self, job: _Job) -> None:
        params = job.params
        scores = None
        if params.prompt_logprobs is not None:
            scores = score_prompt(self.model, job.prompt, params.prompt_logprobs)
        streamer = _Streamer(self, job, scores)
        with streamer.watch_logits():
            run_generate(self, job.prompt, params, job.seed, streamer)


class _Streamer(BaseStreamer):
    """Puts each token on the queue as `generate` makes it, the finish reason with the last."""

    def __init__(
        self, engine: StockEngine, job: _Job, scores: list[TokenLogprobs | None] | None
    ) -> None:
        self._job = job
        self._put = engine._outbox.put
        self._scores = scores
        self._eos = frozenset() if job.params.ignore_eos else engine.eos_token_ids
        self._stops = frozenset(job.params.stop_token_ids)
        self.model = engine.model
        self._logits: torch.Tensor | None = None
        self._count = -1  # the first call brings the prompt

    def put(self, value: torch.Tensor) -> None:
        job = self._job
        if job.aborted:
            raise _Aborted
        self._count += 1
        if self._count == 0:
            return
        token_id = int(value)
        output = Output(job.request_id, [token_id])
        if self._count == 1:
            output.prompt_logprobs = self._scores
        if job.params.logprobs is not None:
            assert self._logits is not None
            output.logprobs = score_rows(self._logits, [token_id], job.params.logprobs)
        if self._count >= job.params.min_tokens and token_id in self._stops:
            output.finish_reason, output.stop_reason = "stop", token_id
        elif self._count >= job.params.min_tokens and token_id in self._eos:
            output.finish_reason = "stop"
        elif self._count == job.params.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            output.stats = RequestStats(len(job.prompt), self._count, seed=job.seed)
        self._put(output)

    def end(self) -> None: ...

    def watch_logits(self) -> Any:
        """While log-probabilities are asked for, sees the head's rows before any processor."""
        head = self.model.get_output_embeddings()
        if self._job.params.logprobs is None:
            return _Hook(None)

        def keep(_module: torch.nn.Module, _inputs: Any, logits: torch.Tensor) -> None:
            self._logits = capped_logits(self.model, logits[0, -1:].float())

        return _Hook(head.register_forward_hook(keep))


class _Hook:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()


def run_generate(
    engine: StockEngine,
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    streamer: BaseStreamer,
) -> None:
    """One `generate` call with every sampler field passed; tokens go to `streamer`."""
    eos = () if params.ignore_eos else engine.eos_token_ids
    stops = sorted({*eos, *params.stop_token_ids})
    config = GenerationConfig(
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        do_sample=params.temperature > 0,
        num_beams=1,
        use_cache=True,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=stops or None,
        pad_token_id=None,
        cache_implementation=engine.cache,
    )
    if params.temperature > 0:
        config.temperature = params.temperature
        config.top_k = params.top_k
        config.top_p = params.top_p
        config.min_p = params.min_p or None
        torch.manual_seed((seed + params.choice * _CHOICE_STRIDE) % 2**63)
    if params.logit_bias:
        config.sequence_bias = {(int(i),): float(b) for i, b in params.logit_bias.items()}
    ids = torch.tensor([prompt], device=engine.model.device)
    generate: Any = engine.model.generate
    generate(ids, generation_config=config, streamer=streamer)


def _check(params: SamplingParams, vocab_size: int) -> None:
    """`generate` has no such thing: better refused than ignored."""
    for field in ("presence_penalty", "frequency_penalty"):
        if getattr(params, field):
            raise ValueError(f"{field}: transformers' generate cannot do this; leave it at 0")
    draft = params.draft
    if draft is not None and (draft.method != "none" or draft.k not in (0, "auto")):
        raise ValueError("draft: the stock profile does not draft; use method none")
    for token_id in params.logit_bias or ():
        if token_id >= vocab_size:
            raise ValueError(f"logit_bias: id {token_id} is outside the vocabulary")
