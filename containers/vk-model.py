#!/opt/venv/bin/python
"""Serves the image's model from the Hub cache at /cache; more arguments go to `vk serve`.

Offline (HF_HUB_OFFLINE=1), only what the cache holds is used. `--health` is the image's own check.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path

ENVIRONMENT = 3
FILES = ["*.json", "*.safetensors", "*.jinja"]


def main(arguments: list[str]) -> int:
    """Replaces itself by `vk serve`; returns only for `--health` and for what went wrong."""
    port = os.environ.get("VK_PORT", "8000")
    if arguments == ["--health"]:
        return healthy(port)
    try:
        model = checkpoint(os.environ["VK_MODEL"], os.environ["VK_SOURCE"], arguments)
    except OSError as error:
        sys.stderr.write(f"error: {os.environ['VK_SOURCE']}: cannot be fetched: {error}\n")
        return ENVIRONMENT
    command = ["vk", "serve", model, "--host", "0.0.0.0", "--port", port]
    command += ["--profile", os.environ.get("VK_PROFILE", "vkae")]
    command += ["--draft", os.environ.get("VK_DRAFT", "none"), *arguments]
    os.execvp("vk", command)


def healthy(port: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=4) as response:
            return 0 if response.status == 200 else 1
    except OSError:
        return 1


def checkpoint(name: str, source: str, arguments: list[str]) -> str:
    """A folder that bears the model's name, or the name alone: then `vk` says what is missing.

    Raises OSError when it cannot be fetched.
    """
    if source == "bundled" or any(a.startswith("random:") or "=random:" in a for a in arguments):
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    try:
        folder = snapshot_download(
            source,
            revision=os.environ.get("VK_REVISION") or None,
            allow_patterns=FILES,
            local_files_only=offline,
        )
    except LocalEntryNotFoundError:
        return name
    link = Path("/tmp") / name
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    return str(link)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
