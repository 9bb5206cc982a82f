"""When is a server ready, and is it ours: our own HTTP probe, while the child is watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx2

from finalbench.errors import EnvironmentMissing, FinalbenchError
from finalbench.runtime.asking import asking


class ServerFailed(FinalbenchError):
    """A server did not start, died, or is not the one that was asked for."""

    exit_code = 4


Reader = Callable[[httpx2.Client], dict[str, Any]]


def wait_ready(
    base_url: str,
    *,
    timeout_s: float,
    dead: Callable[[], str | None],
    read: Reader | None = None,
) -> dict[str, Any]:
    """Poll `/health`, then read the settings in force, by default from `/v1/settings`.

    `dead` tells why the server cannot become ready any more, or None. Returns the settings with the
    served model ids added as `model_ids`. Errors: `ServerFailed`.
    """
    end = time.monotonic() + timeout_s
    last = "no answer"
    with asking(base_url) as client:
        while True:
            reason = dead()
            if reason is not None:
                raise ServerFailed(reason)
            try:
                # Whoever else has the port may never answer; a slow server is asked again.
                response = client.get("/health", timeout=1.0)
                if response.status_code == 200:
                    break
                last = f"/health answers {response.status_code}"
            except httpx2.HTTPError as error:
                last = type(error).__name__
            if time.monotonic() > end:
                raise ServerFailed(f"not ready after {timeout_s:g} s ({last})")
            time.sleep(0.05)
        return (read or read_settings)(client)


def read_settings(client: httpx2.Client) -> dict[str, Any]:
    """`/v1/settings`, plus the ids of `/v1/models` as `model_ids`. Errors: `ServerFailed`."""
    try:
        settings = client.get("/v1/settings").raise_for_status().json()
        models = client.get("/v1/models").raise_for_status().json()
        ids = [entry["id"] for entry in models["data"]]
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ServerFailed(f"settings cannot be read back: {error}") from error
    if not isinstance(settings, dict):
        raise ServerFailed("/v1/settings is not an object")
    return settings | {"model_ids": ids}


def check_settings(
    settings: Mapping[str, Any], asked: Mapping[str, Any], *, nonce: str | None
) -> None:
    """Refuse a server that is not ours or runs otherwise than asked. Errors: `ServerFailed`."""
    if nonce is not None and settings.get("nonce") != nonce:
        raise ServerFailed("another server answers on this port: its nonce is not ours")
    for key in ("profile", "dtype", "weights"):
        wanted, served = asked.get(key), settings.get(key)
        if key == "weights" and wanted == "auto":
            wanted = "real"  # a row may be called real only when the server says so
        if wanted in (None, "auto") or served is None:
            continue
        if key == "weights" and served == "random" and str(wanted).startswith("random"):
            continue  # a foreign server draws its own, whatever the seed
        if str(served).removeprefix("torch.") != str(wanted):
            raise ServerFailed(f"the server runs with {key} {served!r}, asked for {wanted!r}")
    device = str(settings.get("device", ""))
    wanted_device = asked.get("device")
    if wanted_device in ("cpu", "cuda") and device and not device.startswith(str(wanted_device)):
        raise EnvironmentMissing(f"the server runs on {device!r}, asked for {wanted_device!r}")
    threads = asked.get("threads")
    served_threads = settings.get("threads")
    if threads is not None and served_threads is not None and served_threads != threads:
        raise ServerFailed(f"the server runs {served_threads} threads, asked for {threads}")
