"""The settings a server runs with, read back from its own pages and log in its own dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from finalbench.arms import Settings, engine_of
from finalbench.provenance import list_gpus
from finalbench.runtime.ready import ServerFailed, read_settings

_LOG_BYTES = 4 << 20  # the lines that matter are near the start
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Reads one server's settings; called before the first request and after the last one."""

    settings: Settings
    log: Path | None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, client: httpx2.Client) -> dict[str, Any]:
        """Errors: `ServerFailed` when it does not answer, or drafts otherwise than asked."""
        engine = engine_of(self.settings)
        if engine.name == "vk":
            return read_settings(client)
        pages = {path: page for path in engine.pages if (page := _page(client, path)) is not None}
        ids = _model_ids(client, pages)
        found = engine.effective(pages, _start_of(self.log), self.settings) | {"model_ids": ids}
        if str(found.get("device", "")).startswith("cuda") and (gpus := list_gpus()):
            found["device_name"] = gpus[0].name
        own = self._own_variables(engine.environment_prefix)
        if own:
            found["variables"] = own
        self._check_draft(found)
        return {"schema_version": 1, "kernel_fallbacks": []} | found

    def _own_variables(self, prefix: str | None) -> dict[str, str]:
        """Variables of that project that change how its server runs; never a secret."""
        if prefix is None:
            return {}
        return {
            name: value
            for name, value in sorted(self.environment.items())
            if name.startswith(prefix) and not any(word in name for word in _SECRET)
        }

    def _check_draft(self, found: Mapping[str, Any]) -> None:
        asked = (self.settings.get("draft_method") or "none", self.settings.get("draft_k") or 0)
        served = found.get("draft_default") or {}
        told = (served.get("method"), served.get("k"))
        if None not in told and told != asked and "draft_method" in self.settings:
            raise ServerFailed(
                f"the server drafts with {told[0]} {told[1]}, asked for {asked[0]} {asked[1]}"
            )


def _page(client: httpx2.Client, path: str) -> Any:
    try:
        answer = client.get(path)
    except httpx2.HTTPError as error:
        raise ServerFailed(f"{path} cannot be read: {error or type(error).__name__}") from error
    if answer.status_code != 200:
        return None
    try:
        return answer.json()
    except ValueError:
        return None


def _model_ids(client: httpx2.Client, pages: Mapping[str, Any]) -> list[str]:
    models = pages.get("/v1/models") or _page(client, "/v1/models")
    try:
        ids = [str(entry["id"]) for entry in models["data"]]
    except (TypeError, KeyError) as error:
        raise ServerFailed("/v1/models names no model") from error
    if not ids:
        raise ServerFailed("/v1/models names no model")
    return ids


def _start_of(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        return file.read(_LOG_BYTES).decode("utf-8", "replace")
