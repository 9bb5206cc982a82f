"""Our own engine and the stock baseline behind the same server: `vk serve`, `vk bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finalbench.arms.engine import Address, Engine, Pages, Settings, model_argument

_SHARED = ("profile", "weights", "device", "dtype", "threads")


def serve(executable: Sequence[str], settings: Settings, address: Address) -> list[str]:
    """`vk serve MODEL ...`; the server serves under the model's own name."""
    command = [*executable, "serve", model_argument(settings), *_shared(settings)]
    command += ["--max-model-len", str(settings["max_model_len"])]
    command += ["--max-sequences", str(settings["max_sequences"])]
    command += ["--draft", str(settings["draft"])]
    return [*command, "--host", address.host, "--port", str(address.port)]


def bare_command(
    executable: Sequence[str],
    settings: Settings,
    *,
    prompt_tokens: int,
    output_tokens: int,
    repeat: int | None,
) -> list[str]:
    """The command line that times an arm's own loop without HTTP.

    `repeat` None: one prompt at a time from its standard input, as they come.
    """
    command = [*executable, "bench", model_argument(settings), "--bare", "--json"]
    command += _shared(settings)
    command += ["--prompt-tokens", str(prompt_tokens), "--output-tokens", str(output_tokens)]
    return [*command, *(["--stdin"] if repeat is None else ["--repeat", str(repeat)])]


def _shared(settings: Settings) -> list[str]:
    words: list[str] = []
    for key in _SHARED:
        if settings[key] is not None:
            words += [f"--{key}", str(settings[key])]
    return words


def _effective(pages: Pages, log: str, settings: Settings) -> dict[str, Any]:
    return dict(pages.get("/v1/settings") or {})


VK = Engine(
    name="vk",
    title="VK",
    variable="FINALBENCH_VK",
    commands=("vk",),
    hint="pip install -e engine, or name it in FINALBENCH_VK",
    serve=serve,
    pages=("/v1/settings",),
    effective=_effective,
    body=dict,
    counters="request",
    tokens="token ids in each chunk",
    synthetic_drafts=True,
    per_request=("sampling", "seed", "drafts", "output length"),
    restart=("weights", "dtype", "device", "threads", "profile"),
)
