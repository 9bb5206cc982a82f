"""The catalogue of servers: how each arm is started, and what it can be asked for per request.

An arm is data. No other module branches on an arm's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from finalbench.errors import UsageError
from finalbench.scenario import Scenario

_SHARED = ("profile", "weights", "device", "dtype", "threads")

Settings = dict[str, str | int | None]


@dataclass(frozen=True, slots=True)
class Arm:
    """One kind of server.

    `draft_axis`: drafts are a request setting, so one process serves the whole draft axis.
    `scores`: it can judge another arm's output (`prompt_logprobs` with logits).
    `bare_loop`: `vk bench` can time it without HTTP.
    """

    name: str
    profile: str
    draft_axis: bool
    scores: bool
    bare_loop: bool
    engine: Literal["vk"] = "vk"


ARMS: Mapping[str, Arm] = {
    "vk": Arm(name="vk", profile="vkae", draft_axis=True, scores=False, bare_loop=False),
    "stock": Arm(name="stock", profile="stock", draft_axis=False, scores=True, bare_loop=True),
    # Static cache and compiled steps; where both stocks run, the smaller ratio is the headline.
    "stock-compiled": Arm(
        name="stock-compiled",
        profile="stock-compiled",
        draft_axis=False,
        scores=False,
        bare_loop=True,
    ),
    # The same servers under a second name: an A/A run shows what counts as a difference here.
    "vk-aa": Arm(name="vk-aa", profile="vkae", draft_axis=True, scores=False, bare_loop=False),
    "stock-aa": Arm(
        name="stock-aa", profile="stock", draft_axis=False, scores=True, bare_loop=True
    ),
}


def arm(name: str) -> Arm:
    """The arm of this name, or a usage error that lists the ones there are."""
    if name not in ARMS:
        raise UsageError(f"unknown arm {name!r}; arms are {', '.join(ARMS)}")
    return ARMS[name]


def server_settings(name: str, scenario: Scenario) -> Settings:
    """What a server of this arm is started with; equal settings share one process."""
    spec = arm(name)
    serving = scenario.serving
    device = scenario.hardware.device if serving.device == "auto" else serving.device
    return {
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


def serve_command(executable: list[str], settings: Settings, *, host: str, port: int) -> list[str]:
    """The command line of one server. `executable` is what runs `vk`."""
    command = [*executable, "serve", model_argument(settings)]
    for key in _SHARED:
        if settings[key] is not None:
            command += [f"--{key}", str(settings[key])]
    command += ["--max-model-len", str(settings["max_model_len"])]
    command += ["--max-sequences", str(settings["max_sequences"])]
    command += ["--draft", str(settings["draft"])]
    return [*command, "--host", host, "--port", str(port)]


def bare_command(
    executable: list[str],
    settings: Settings,
    *,
    prompt_tokens: int,
    output_tokens: int,
    repeat: int,
) -> list[str]:
    """The command line that times an arm's own loop without HTTP."""
    command = [*executable, "bench", model_argument(settings), "--bare", "--json"]
    for key in _SHARED:
        if settings[key] is not None:
            command += [f"--{key}", str(settings[key])]
    command += ["--prompt-tokens", str(prompt_tokens), "--output-tokens", str(output_tokens)]
    return [*command, "--repeat", str(repeat)]


def model_argument(settings: Settings) -> str:
    """A checkpoint's folder when one is given, else the model's name."""
    return str(settings.get("path") or settings["model"])
