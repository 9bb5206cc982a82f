"""The catalogue of servers: how each arm is started, and what it can be asked for per request.

An arm is data. No other module branches on an arm's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from finalbench.arms.endpoint import ENDPOINT
from finalbench.arms.engine import Address, Engine, Settings
from finalbench.arms.llamacpp import LLAMACPP
from finalbench.arms.sglang import SGLANG
from finalbench.arms.vk import VK
from finalbench.arms.vllm import VLLM
from finalbench.errors import UsageError
from finalbench.scenario import DraftSetting, Scenario

ENGINES: Mapping[str, Engine] = {e.name: e for e in (VK, VLLM, SGLANG, LLAMACPP, ENDPOINT)}


@dataclass(frozen=True, slots=True)
class Arm:
    """One kind of server.

    `drafts`: `request`, so one process serves the whole draft axis; `restart`, one process for
    each draft setting; or `none`.
    `scores`: it can judge another arm's output (`prompt_logprobs` with logits).
    `bare_loop`: `vk bench` can time it without HTTP.
    """

    name: str
    profile: str
    drafts: Literal["request", "restart", "none"]
    scores: bool = False
    bare_loop: bool = False
    engine: str = "vk"

    @property
    def peer(self) -> bool:
        """Another project's server."""
        return self.engine != "vk"


_ALL = (
    Arm("vk", "vkae", "request"),
    Arm("stock", "stock", "none", scores=True, bare_loop=True),
    # Static cache and compiled steps; where both stocks run, the smaller ratio is the headline.
    Arm("stock-compiled", "stock-compiled", "none", bare_loop=True),
    # The same servers under a second name: an A/A run shows what counts as a difference here.
    Arm("vk-aa", "vkae", "request"),
    Arm("stock-aa", "stock", "none", scores=True, bare_loop=True),
    Arm("vllm", "vllm", "restart", engine="vllm"),
    Arm("sglang", "sglang", "restart", engine="sglang"),
    Arm("llamacpp", "llamacpp", "none", engine="llamacpp"),
    Arm("llamacpp-aa", "llamacpp", "none", engine="llamacpp"),
    Arm("endpoint", "endpoint", "none", engine="endpoint"),
)
ARMS: Mapping[str, Arm] = {found.name: found for found in _ALL}


def arm(name: str) -> Arm:
    """The arm of this name, or a usage error that lists the ones there are."""
    if name not in ARMS:
        raise UsageError(f"unknown arm {name!r}; arms are {', '.join(ARMS)}")
    return ARMS[name]


def engine_of(settings: Mapping[str, Any]) -> Engine:
    """The engine that a server with these settings belongs to."""
    return ENGINES[str(settings.get("engine", "vk"))]


def serves_draft(name: str, draft: DraftSetting) -> bool:
    """Whether this arm can run the draft setting; the plan leaves the others out."""
    if draft.method == "none" or arm(name).drafts == "request":
        return True
    if draft.acceptance is not None and not ENGINES[arm(name).engine].synthetic_drafts:
        return False
    plain = isinstance(draft.k, int) and draft.head_rows is None
    return arm(name).drafts == "restart" and draft.method == "mtp" and plain


def default_baseline(names: Sequence[str]) -> str | None:
    """What the others are compared with: stock, else the first server of another project."""
    if "stock" in names:
        return "stock"
    others = [name for name in names if name in ARMS and ARMS[name].peer]
    return others[0] if others and len(names) > 1 else None


def server_settings(
    name: str, scenario: Scenario, draft: DraftSetting | None = None, prefix_cache: bool = False
) -> Settings:
    """What a server of this arm is started with; equal settings share one process.

    `draft` and `prefix_cache` count only where they are fixed at the start; an engine without such
    a cache starts as ever.
    """
    spec = arm(name)
    serving = scenario.serving
    device = scenario.hardware.device if serving.device == "auto" else serving.device
    settings: Settings = {
        "model": scenario.model.name,
        "path": scenario.model.path,
        "profile": serving.vk_profile if spec.profile == "vkae" else spec.profile,
        "weights": serving.weights,
        "device": device,
        "dtype": scenario.model.dtype,
        "threads": serving.threads,
        "max_model_len": max(scenario.axes.seq_len) + max(scenario.axes.output_len) + 16,
        "max_sequences": serving.max_sequences,
        "draft": "none",  # the default of the server; every request states its own
    }
    if not spec.peer:
        return settings
    chosen = draft if draft is not None and spec.drafts == "restart" else DraftSetting()
    if prefix_cache and ENGINES[spec.engine].prefix_cache == "restart":
        settings["prefix_cache"] = "on"
    return settings | {
        "engine": spec.engine,
        "draft": chosen.label,
        "draft_method": chosen.method,
        "draft_k": chosen.k,
        "draft_acceptance": None if chosen.acceptance is None else f"{chosen.acceptance:g}",
    }


def serve_command(
    executable: Sequence[str], settings: Settings, *, host: str, port: int, name: str = ""
) -> list[str]:
    """The command line of one server. `name`: what a foreign server calls the model."""
    address = Address(host, port, name or str(settings["model"]))
    return engine_of(settings).serve(executable, settings, address)
