"""A client for what is asked of a server beside its timed requests."""

from __future__ import annotations

import httpx2


def asking(base_url: str, *, timeout_s: float = 5.0) -> httpx2.Client:
    """No proxies. The trust store takes 40 ms to read, so only https does that."""
    secure = base_url.startswith("https:")
    return httpx2.Client(base_url=base_url, timeout=timeout_s, trust_env=False, verify=secure)
