"""Any OpenAI-compatible server that the user runs; nothing of it is started or assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finalbench.arms.engine import Address, Engine, Pages, Settings, without_draft
from finalbench.errors import UsageError


def serve(executable: Sequence[str], settings: Settings, address: Address) -> list[str]:
    """There is no command: `UsageError` says how to name the server."""
    raise UsageError(
        "the arm `endpoint` is a server that you run", hint="--endpoint endpoint=http://HOST:PORT"
    )


def effective(pages: Pages, log: str, settings: Settings) -> dict[str, Any]:
    """What `/v1/settings` says where it is served, else what `/v1/models` gives away."""
    told = pages.get("/v1/settings")
    if isinstance(told, dict):
        return dict(told) | {"profile": "endpoint", "read_from": ["/v1/settings"]}
    models = (pages.get("/v1/models") or {}).get("data") or [{}]
    return {
        "profile": "endpoint",
        "weights": str(settings["weights"]).replace("auto", "real").split(":")[0],
        "max_model_len": models[0].get("max_model_len"),
        "read_from": ["/v1/models"],
        "versions": {},
    }


ENDPOINT = Engine(
    name="endpoint",
    title="your server",
    variable="",
    commands=(),
    hint="--endpoint endpoint=http://HOST:PORT",
    serve=serve,
    pages=("/v1/settings", "/v1/models"),
    effective=effective,
    body=without_draft,
    counters="window",
    tokens="token ids in each chunk where it serves them, else usage",
    per_request=("sampling", "seed", "output length"),
    restart=("everything else",),
    differs=(
        "it is started, set and stopped by its user: one process for all blocks, so differences "
        "between starts are not seen",
        "weights, type and drafts are as its user says; only what it serves was read back",
    ),
)
