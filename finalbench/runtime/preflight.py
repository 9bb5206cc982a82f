"""Before anything starts: does this machine have what the scenario needs? One message if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from finalbench.arms import ENGINES, arm
from finalbench.errors import EnvironmentMissing
from finalbench.provenance import list_gpus
from finalbench.runtime.server import executable_of
from finalbench.scenario import Scenario

GB = 1e9


@dataclass(frozen=True, slots=True)
class Need:
    """One thing a scenario needs, and why it is not there (None: it is)."""

    name: str
    wanted: str
    missing: str | None


def check_environment(
    scenario: Scenario,
    environment: Mapping[str, str],
    *,
    engine_here: bool = True,
    started: Sequence[str] = (),
) -> None:
    """Errors: `EnvironmentMissing` with every missing thing and what to run instead.

    `engine_here` is false where the engine comes in a container. `started`: the arms whose servers
    are ours to start, all of them by default.
    """
    if engine_here:
        for engine in dict.fromkeys(arm(name).engine for name in started or scenario.arms):
            executable_of(ENGINES[engine], environment)
    needs = needs_of(scenario, environment)
    missing = [need for need in needs if need.missing]
    if not missing:
        return
    wanted = ", ".join(need.wanted for need in needs)
    here = ", ".join(str(need.missing) for need in missing)
    weights = any(need.name == "weights" for need in missing)
    advice = ["`finalbench run --model vk-tiny` runs anywhere"]
    advice.append(f"`finalbench plan --model {scenario.name}` shows what would run")
    if weights and scenario.model.source != "bundled":
        advice.append(
            f"with the hardware: `hf download {scenario.model.source}` and `--checkpoint DIR`, or "
            "`--weights random:1` for its shape alone"
        )
    raise EnvironmentMissing(
        f"{scenario.name} needs {wanted}; here: {here}", hint="; ".join(advice)
    )


def needs_of(scenario: Scenario, environment: Mapping[str, str]) -> list[Need]:
    """Device, memory and weights, each with what is missing of it."""
    return [_device(scenario), _memory(scenario), *_weights(scenario, environment)]


def checkpoint_folder(scenario: Scenario, environment: Mapping[str, str]) -> Path | None:
    """The checkpoint given, else the newest snapshot in the Hugging Face cache, else None."""
    if scenario.model.path is not None:
        return Path(scenario.model.path)
    home = environment.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    folder = cache / f"models--{scenario.model.source.replace('/', '--')}" / "snapshots"
    snapshots = [path.parent for path in folder.glob("*/config.json")]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def _device_kind(scenario: Scenario) -> str:
    device = scenario.serving.device
    return scenario.hardware.device if device == "auto" else device


def _device(scenario: Scenario) -> Need:
    if _device_kind(scenario) == "cpu":
        return Need("device", "a CPU", None)
    count = scenario.hardware.devices
    wanted = f"{count} CUDA GPU{'s' if count > 1 else ''}"
    found = len(list_gpus())
    missing = None if found >= count else f"{found or 'no'} GPU{'s' if found > 1 else ''}"
    return Need("device", wanted, missing)


def _memory(scenario: Scenario) -> Need:
    needed = scenario.hardware.memory_gb
    wanted = f"{needed:g} GB of memory"
    if _device_kind(scenario) == "cpu":
        have = psutil.virtual_memory().total / GB
        return Need("memory", wanted, None if have >= needed else f"{have:.0f} GB of memory")
    gpus = list_gpus()
    have = sum(gpu.memory_bytes or 0 for gpu in gpus[: scenario.hardware.devices]) / GB
    # Without a GPU the device line says it all.
    missing = f"{have:.0f} GB of GPU memory" if gpus and have < needed else None
    return Need("memory", f"{wanted} on it" if scenario.hardware.devices == 1 else wanted, missing)


def _weights(scenario: Scenario, environment: Mapping[str, str]) -> list[Need]:
    model = scenario.model
    if scenario.serving.weights != "auto" or (model.source == "bundled" and model.path is None):
        return []
    wanted = f"the weights of {model.source} ({scenario.hardware.disk_gb:g} GB)"
    if model.source == "bundled":
        wanted = f"a checkpoint of {model.name} at {model.path}"
    folder = checkpoint_folder(scenario, environment)
    if folder is None:
        return [Need("weights", wanted, "no checkpoint of it in the cache")]
    if folder.is_file():
        return [Need("weights", wanted, None)]  # one file, such as GGUF
    if not (folder / "config.json").is_file():
        return [Need("weights", wanted, f"no config.json in {folder}")]
    return [Need("weights", wanted, None)]
