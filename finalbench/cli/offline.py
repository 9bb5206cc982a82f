"""`doctor --offline`: is everything here that a run needs when there is no network?

Each check looks at this machine alone: nothing is pulled, fetched or looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from finalbench.cli.doctor import Check
from finalbench.errors import FinalbenchError

if TYPE_CHECKING:
    from finalbench.scenario import Scenario

_QUIET = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK")


def check_offline(environment: Mapping[str, str], names: list[str]) -> list[Check]:
    """Weights, images and variables for the scenarios `names`; all shipped ones when empty."""
    from finalbench.scenario import load_scenario, scenario_files

    scenarios = [load_scenario(name) for name in names or scenario_files()]
    found = [_weights(scenario, environment, asked=bool(names)) for scenario in scenarios]
    arms = list(dict.fromkeys(arm for scenario in scenarios for arm in scenario.arms))
    found += _images(arms, environment)
    given = [name for name in _QUIET if environment.get(name)]
    text = "servers are started with HF_HUB_OFFLINE=1 unless it is set otherwise"
    text += f"; set here: {', '.join(given)}" if given else ""
    refused = environment.get("HF_HUB_OFFLINE") in (None, "1")
    return [*found, Check("calls home", "ok" if refused else "warn", text)]


def _weights(scenario: Scenario, environment: Mapping[str, str], *, asked: bool) -> Check:
    from finalbench.runtime.preflight import checkpoint_folder

    name, model = f"weights {scenario.name}", scenario.model
    if model.source == "bundled":
        return Check(name, "ok", "come with the engine")
    folder = checkpoint_folder(scenario, environment)
    if folder is None:
        text = f"not in the cache: with a network, `hf download {model.source}`"
        return Check(name, "FAIL" if asked else "warn", text)
    files = [path for path in folder.glob("*") if path.suffix in (".safetensors", ".gguf")]
    broken = [path.name for path in files if not path.exists()]
    if not files or broken:
        what = f"{', '.join(broken)} is a link to nothing" if broken else "no weights beside config"
        return Check(name, "FAIL" if asked else "warn", f"{folder.name}: {what}")
    return Check(name, "ok", f"{len(files)} files, {folder.name}")


def _images(arms: list[str], environment: Mapping[str, str]) -> Iterator[Check]:
    """A warning where processes would do; images that are here are named with their digest."""
    from finalbench.runtime.container import ContainerRuntime
    from finalbench.runtime.container_images import local_image

    try:
        runtime = ContainerRuntime.open(environment)
    except FinalbenchError as error:
        yield Check("images", "warn", f"{error}; --runtime process needs none")
        return
    for image in dict.fromkeys(runtime.catalogue.server(arm).image for arm in arms):
        here = local_image(runtime.client, image)
        if here is None:
            yield Check(f"image {image}", "warn", "not here: `docker save` and `load` bring it")
        else:
            yield Check(f"image {image}", "ok", here.digest[:80])
