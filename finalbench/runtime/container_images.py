"""The catalogue of images (`containers/images.yaml`), and an image brought onto this machine.

A digest is either what a registry gave or null; null is never filled in, and `--pinned` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from docker import DockerClient
from docker.errors import APIError, DockerException, ImageNotFound
from docker.models.images import Image
from pydantic import Field, ValidationError

from finalbench.errors import EnvironmentMissing, UsageError
from finalbench.scenario import Frozen

IMAGES_VARIABLE = "FINALBENCH_IMAGES"
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class ImageRef(Frozen):
    """One image: a name with a tag, and the digest a registry gave it, or null."""

    image: str
    digest: Digest | None = None
    note: str | None = None

    def pinned(self) -> str:
        """`name@sha256:...`. Errors: `UsageError` when no digest is known."""
        if self.digest is None:
            raise UsageError(
                f"{self.image} has no digest in images.yaml, so it cannot be pinned",
                hint="pull it, read the digest the registry gave, and write it there",
            )
        name, separator, tag = self.image.rpartition(":")
        return f"{name if separator and '/' not in tag else self.image}@{self.digest}"


class ServerImage(ImageRef):
    """The image of a server: which arms it serves, and how a container of it is run.

    `entry` is what runs `vk` inside, or another project's server. `mounts` are host folders shown
    read-only at the same path, `memory` is a limit such as `8g` (swap included), `shm` the size of
    shared memory.
    """

    dockerfile: str | None = None
    arms: Annotated[tuple[str, ...], Field(min_length=1)]
    entry: Annotated[tuple[str, ...], Field(min_length=1)] = ("vk",)
    environment: dict[str, str] = Field(default_factory=dict)
    mounts: tuple[str, ...] = ()
    memory: Annotated[str, Field(pattern=r"^[0-9]+[kmgKMG]?$")] | None = None
    shm: Annotated[str, Field(pattern=r"^[0-9]+[kmgKMG]?$")] = "1g"
    network: Literal["host", "bridge"] = "host"


class ModelImage(Frozen):
    """A thin image over `vk`: the model's name, where its weights come from, at which revision."""

    source: str
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    draft: str = "none"


class Catalogue(Frozen):
    """`images.yaml`, validated."""

    schema_version: Literal[1] = 1
    base: ImageRef
    servers: dict[str, ServerImage]
    models: dict[str, ModelImage] = Field(default_factory=dict)
    peers: dict[str, ServerImage] = Field(default_factory=dict)

    def server(self, arm: str) -> ServerImage:
        """The image of an arm. Errors: `UsageError` that lists the arms there are."""
        every = (*self.servers.values(), *self.peers.values())
        for spec in every:
            if arm in spec.arms:
                return spec
        known = sorted({name for spec in every for name in spec.arms})
        raise UsageError(f"no image for arm {arm!r}; images.yaml has {', '.join(known)}")


def catalogue_file(environment: Mapping[str, str]) -> Path:
    """The file named by FINALBENCH_IMAGES, else the shipped one. Errors: `EnvironmentMissing`."""
    if given := environment.get(IMAGES_VARIABLE):
        path = Path(given)
    else:
        path = Path(str(resources.files("finalbench.containers"))) / "images.yaml"
    if not path.is_file():
        raise EnvironmentMissing(
            f"no list of images at {path}", hint=f"name another in {IMAGES_VARIABLE}, or unset it"
        )
    return path


def load_catalogue(path: Path) -> Catalogue:
    """Read and validate. Errors: `UsageError` that names the file and the field."""
    try:
        return Catalogue.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where}: {first['msg']}") from error
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image on this machine. `digest` is the registry's `name@sha256`, else the image's id."""

    id: str
    digest: str
    user: str
    entry: tuple[str, ...]


def local_image(client: DockerClient, name: str) -> LocalImage | None:
    """The image when it is here, else None."""
    try:
        found: Image = client.images.get(name)
    except ImageNotFound:
        return None
    facts = found.attrs or {}
    config, digests = facts.get("Config") or {}, facts.get("RepoDigests") or []
    return LocalImage(
        id=str(found.id),
        digest=str(digests[0] if digests else found.id),
        user=str(config.get("User") or ""),
        entry=tuple(config.get("Entrypoint") or ()),
    )


def bring(client: DockerClient, name: str, report: Callable[[str], None]) -> LocalImage:
    """The image, pulled if it is not here. Errors: `EnvironmentMissing` with the reason."""
    found = local_image(client, name)
    if found is None:
        pull(client, name, report)
        found = local_image(client, name)
    if found is None:
        raise EnvironmentMissing(f"image {name} was pulled and is not there")
    return found


def pull(client: DockerClient, name: str, report: Callable[[str], None]) -> None:
    """Pull by tag or digest; `report` is told the progress. Errors: `EnvironmentMissing`."""
    repository, at, digest = name.partition("@")
    tag = digest if at else None
    if not at and ":" in name.rpartition("/")[2]:
        repository, _, tag = name.rpartition(":")
    try:
        events = client.api.pull(repository, tag=tag or "latest", stream=True, decode=True)
        for line in pull_progress(name, events):
            report(line)
    except (APIError, DockerException) as error:
        raise EnvironmentMissing(
            f"image {name} is not here and cannot be pulled: {reason_of(error)}",
            hint="`make images` builds ours; `docker load` brings one without a network",
        ) from error


def pull_progress(name: str, events: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """One line a change, in whole percent. Errors: `DockerException` at an `error` event."""
    layers: dict[str, tuple[int, int]] = {}
    shown = ""
    for event in events:
        if "error" in event:
            raise DockerException(str(event["error"]))
        detail = event.get("progressDetail") or {}
        # "Extracting" counts the same bytes a second time.
        if event.get("status") == "Downloading" and detail.get("total"):
            layers[str(event.get("id"))] = (int(detail.get("current", 0)), int(detail["total"]))
        elif event.get("status") == "Download complete" and event.get("id") in layers:
            total = layers[event["id"]][1]
            layers[event["id"]] = (total, total)
        done, total = (sum(pair[i] for pair in layers.values()) for i in (0, 1))
        share = f" {100 * done // total} % of {total / 1e6:.0f} MB" if total else ""
        line = f"pulling {name}{share}"
        if line != shown:
            shown = line
            yield line


def reason_of(error: Exception) -> str:
    """The engine's own words, on one line."""
    text = getattr(error, "explanation", None) or str(error)
    return " ".join(str(text).split())
