"""Builds the container images of images.yaml: the two bases, then the thin ones over them.

`make images`, or `python containers/build.py vk stock vk-qwen35-35b-a3b --pinned`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from docker import DockerClient
from docker.errors import APIError, BuildError

from finalbench import __version__
from finalbench.errors import EnvironmentMissing, FinalbenchError, UsageError
from finalbench.runtime.container_engine import connect
from finalbench.runtime.container_images import Catalogue, load_catalogue, reason_of

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Build:
    """One image to build."""

    name: str
    tag: str
    dockerfile: str
    arguments: dict[str, str] = field(default_factory=dict)


def builds(catalogue: Catalogue, *, base: str | None, pinned: bool) -> Iterator[Build]:
    """Every image in the order they need each other. Errors: `UsageError` for a null digest."""
    vk = catalogue.servers["vk"]
    root = base or (catalogue.base.pinned() if pinned else catalogue.base.image)
    for name, spec in catalogue.servers.items():
        below = root if name == "vk" else vk.image
        yield Build(name, spec.image, str(spec.dockerfile), {"BASE_IMAGE": below})
    tag = vk.image.rpartition(":")[2]
    for name, model in catalogue.models.items():
        if pinned and model.source != "bundled" and model.revision is None:
            raise UsageError(f"models.{name} has no revision in images.yaml, so it is not pinned")
        yield Build(
            f"vk-{name}",
            f"vk-{name}:{tag}",
            "model.Dockerfile",
            {
                "BASE_IMAGE": vk.image,
                "MODEL": name,
                "MODEL_SOURCE": model.source,
                "MODEL_REVISION": model.revision or "",
                "MODEL_DRAFT": model.draft,
            },
        )
    for name, peer in catalogue.peers.items():
        image = peer.pinned() if pinned else peer.image
        tag = peer.image.rpartition(":")[2]
        yield Build(
            f"peer-{name}",
            f"finalbench/{name}:{tag}",
            "peer.Dockerfile",
            {"BASE_IMAGE": image, "PEER": name},
        )


def build(
    client: DockerClient,
    what: Build,
    *,
    extra: dict[str, str],
    cache: bool = True,
    network: str | None = None,
) -> str:
    """Build one image and give it its tags; returns its id. Errors: `EnvironmentMissing`."""
    arguments = what.arguments | extra
    try:
        image, _ = client.images.build(
            path=str(ROOT),
            dockerfile=f"containers/{what.dockerfile}",
            tag=what.tag,
            buildargs=arguments,
            nocache=not cache,
            network_mode=network,
            rm=True,
            forcerm=True,
        )
    except BuildError as error:
        tail = "".join(str(line.get("stream", "")) for line in error.build_log)[-2000:]
        raise EnvironmentMissing(f"{what.name}: {error.msg}\n{tail}") from error
    except APIError as error:
        raise EnvironmentMissing(f"{what.name}: {reason_of(error)}") from error
    image.tag(what.tag.rpartition(":")[0], "latest")
    return str(image.id)


def labels() -> dict[str, str]:
    """Version, commit and source, as build arguments."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    dirty = subprocess.run(
        ["git", "-C", str(ROOT), "status", "--porcelain", "--", "engine", "containers"],
        capture_output=True,
        text=True,
        check=False,
    )
    commit = done.stdout.strip() or "unknown"
    suffix = "-dirty" if dirty.stdout.strip() else ""
    return {"VERSION": __version__, "COMMIT": commit + suffix}


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="images to build; our own when none is given")
    parser.add_argument("--base", help="base image of `vk` instead of the one in images.yaml")
    parser.add_argument("--pinned", action="store_true", help="refuse a base without a digest")
    parser.add_argument("--pip-arguments", default="", help="for pip inside, such as an index")
    parser.add_argument("--stock-kernels", help="packages of the stock image; empty for a CPU")
    parser.add_argument("--source", default="unknown", help="where the code lies, for the label")
    parser.add_argument("--network", help="of the build's commands, such as `host`")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--list", action="store_true", help="say what would be built")
    given = parser.parse_args(arguments)
    try:
        catalogue = load_catalogue(ROOT / "containers" / "images.yaml")
        chosen = select(builds(catalogue, base=given.base, pinned=given.pinned), given.names)
        if given.list:
            for what in chosen:
                sys.stdout.write(f"{what.name:<24} {what.tag}\n")
            return 0
        client = connect(os.environ)
        extra = {**labels(), "SOURCE": given.source, "PIP_ARGUMENTS": given.pip_arguments}
        if given.stock_kernels is not None:
            extra["STOCK_KERNELS"] = given.stock_kernels
        for what in chosen:
            sys.stderr.write(f"building {what.tag}\n")
            digest = build(
                client, what, extra=extra, cache=not given.no_cache, network=given.network
            )
            sys.stdout.write(f"{what.tag} {digest}\n")
    except FinalbenchError as error:
        sys.stderr.write(f"error: {error}\n")
        if error.hint:
            sys.stderr.write(f"\nhint: {error.hint}\n")
        return error.exit_code
    return 0


def select(every: Iterator[Build], names: Sequence[str]) -> list[Build]:
    """Those named, else all of our own. Errors: `UsageError` for a name that is none."""
    if not names:
        # Peers only on request; stopping here also keeps their digests out of `--pinned`.
        ours = []
        for what in every:
            if what.name.startswith("peer-"):
                break
            ours.append(what)
        return ours
    found = {}
    for what in every:
        if what.name in names:
            found[what.name] = what
        if len(found) == len(set(names)):
            return list(found.values())
    unknown = ", ".join(name for name in names if name not in found)
    raise UsageError(f"no image is called {unknown}; `build.py --list` shows them")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
