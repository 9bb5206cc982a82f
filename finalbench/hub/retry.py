"""Sending to the Hub so that a stumbling service costs patience and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from finalbench.errors import EnvironmentMissing
from finalbench.hub.errors import status_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ATTEMPTS = 6
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
_CONFLICTS = (409, 412)
Sleep = Callable[[float], None]
T = TypeVar("T")


def persist(action: Callable[[int], T], repo_id: str, sleep: Sleep = time.sleep) -> T:
    """Call `action(attempt)` until it goes through, at most `ATTEMPTS` times.

    It is called again after a conflict at once, and after a refusal for the moment or an answer
    that got lost in growing steps; so it must first look whether its work is done already.
    Errors: the service's own, where trying again cannot help; `EnvironmentMissing` at the end.
    """
    from huggingface_hub.errors import HfHubHTTPError

    wait_s = FIRST_WAIT_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action(attempt)
        except HfHubHTTPError as error:
            status = status_of(error)
            if status is not None and status < 500 and status not in (*_CONFLICTS, 429):
                raise
            if attempt < ATTEMPTS:
                sleep(0.0 if status in _CONFLICTS else _wait(error, wait_s))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise EnvironmentMissing(
        f"{repo_id} stayed busy for {ATTEMPTS} attempts; nothing was sent",
        hint="try again later; the plan stays the same",
    )


def open_pull_request(hub: HfApi, repo_id: str, repo_type: str, title: str) -> str | None:
    """The address of an open pull request of this title, so that none is opened twice."""
    every = hub.get_repo_discussions(
        repo_id, repo_type=repo_type, discussion_type="pull_request", discussion_status="open"
    )
    return next((found.url for found in every if found.title == title), None)


def _wait(error: Exception, fallback_s: float) -> float:
    """Seconds the server asks for (`RateLimit: "api";r=0;t=55`, or Retry-After), else ours."""
    headers = getattr(getattr(error, "response", None), "headers", {}) or {}
    for part in str(headers.get("RateLimit", "")).split(";"):
        name, _, value = part.strip().partition("=")
        if name == "t" and value.isdigit():
            return min(float(value), LONGEST_WAIT_S)
    after = str(headers.get("Retry-After", ""))
    return min(float(after), LONGEST_WAIT_S) if after.isdigit() else fallback_s
