"""Servers in containers: images brought, a container started and proven, nothing of it left."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docker import DockerClient

from finalbench.arms import (
    Settings,
    bare_command,
    engine_of,
    model_argument,
    serve_command,
)
from finalbench.errors import EnvironmentMissing
from finalbench.runtime import container_gpu
from finalbench.runtime.container_engine import (
    ENGINE_ERRORS,
    connect,
    engine_name,
    remove_run,
    sweep_orphans,
)
from finalbench.runtime.container_images import (
    Catalogue,
    LocalImage,
    bring,
    catalogue_file,
    load_catalogue,
    local_image,
    reason_of,
)
from finalbench.runtime.container_launch import (
    HOST,
    INSIDE_PORT,
    Launch,
    inside_path,
    launch,
    shown_path,
)
from finalbench.runtime.container_server import ContainerServer
from finalbench.runtime.process import choose_port, last_lines
from finalbench.runtime.readback import ReadBack
from finalbench.runtime.ready import ServerFailed, check_settings, wait_ready
from finalbench.runtime.server import (
    PORT_TAKEN,
    PORT_TRIES,
    LiveServer,
    ServerStartFailed,
    Wanted,
    served_name,
    server_environment,
)


@dataclass(frozen=True, slots=True)
class ContainerRuntime:
    """Brings up servers in containers; one for a run. `devices` GPUs when the device is cuda."""

    client: DockerClient
    catalogue: Catalogue
    environment: Mapping[str, str]
    devices: int = 1
    pinned: bool = False
    images: dict[str, LocalImage] = field(default_factory=dict)

    @classmethod
    def open(
        cls, environment: Mapping[str, str], *, devices: int = 1, pinned: bool = False
    ) -> ContainerRuntime:
        """Errors: `EnvironmentMissing` when no engine answers, `UsageError` for a bad list."""
        catalogue = load_catalogue(catalogue_file(environment))
        return cls(connect(environment), catalogue, environment, devices=devices, pinned=pinned)

    def describe(self) -> str:
        """`Docker 28.2`."""
        return engine_name(self.client)

    def sweep(self) -> list[str]:
        """Remove what killed runs left; returns names. Errors: `EnvironmentMissing`."""
        try:
            return sweep_orphans(self.client)
        except ENGINE_ERRORS as error:
            raise EnvironmentMissing(f"the container engine fails: {reason_of(error)}") from error

    def prepare(self, arms: Iterable[str], report: Callable[[str], None]) -> None:
        """Have every image here before anything is timed.

        Errors: `EnvironmentMissing` with the reason of a failed pull; `UsageError` when an image
        must be pinned and has no digest.
        """
        for arm in arms:
            spec = self.catalogue.server(arm)
            name = spec.pinned() if self.pinned else spec.image
            self.images[arm] = bring(self.client, name, report)

    def missing(self, arms: Iterable[str]) -> list[str]:
        """Names of images that would have to be pulled."""
        names = [self.catalogue.server(arm).image for arm in arms]
        return [name for name in names if local_image(self.client, name) is None]

    def start(self, settings: Settings, wanted: Wanted) -> LiveServer:
        """Start a container, prove its GPUs, wait until it is ready, prove that it is ours.

        Errors: `ServerStartFailed`; `EnvironmentMissing` for what no other cell could have either.
        """
        for attempt in range(PORT_TRIES):
            try:
                return self._start_on(choose_port(HOST), settings, wanted)
            except ServerStartFailed as error:
                taken = PORT_TAKEN.search("\n".join(last_lines(wanted.log, 20)))
                if not taken or attempt == PORT_TRIES - 1:
                    raise
                wanted.log.replace(wanted.log.with_suffix(f".port{attempt}.log"))
                last_error = error
        raise last_error

    def run_bare(
        self, settings: Settings, wanted: Wanted, lengths: Mapping[str, int]
    ) -> tuple[int | None, str]:
        """`vk bench --bare` in a container: its exit code (None: not done in time), and why."""
        entry = list(self.catalogue.server(wanted.arm).entry)
        inside = settings | {"path": inside_path(settings)}
        command = bare_command(
            entry,
            inside,
            prompt_tokens=lengths["prompt_tokens"],
            output_tokens=lengths["output_tokens"],
            repeat=lengths["repeat"],
        )
        server = self._launch(command, server_environment({}, settings, ""), settings, wanted, None)
        try:
            code = server.wait(wanted.timeout_s)
            return code, server.death() or f"not done after {wanted.timeout_s:g} s"
        finally:
            server.stop()

    def close(self, run_id: str) -> None:
        """Remove whatever of this run is left, as after an interrupt in the middle of a start."""
        with contextlib.suppress(*ENGINE_ERRORS):
            remove_run(self.client, run_id)

    def _start_on(self, port: int, settings: Settings, wanted: Wanted) -> LiveServer:
        spec = self.catalogue.server(wanted.arm)
        nonce = secrets.token_hex(8)
        host, inside = (HOST, port) if spec.network == "host" else ("0.0.0.0", INSIDE_PORT)
        command = serve_command(
            list(spec.entry),
            settings | {"path": inside_path(settings)},
            host=host,
            port=inside,
            name=served_name(settings, nonce),
        )
        base_url = f"http://{HOST}:{port}"
        begun = time.monotonic()
        environment = server_environment({}, settings, nonce)
        read = ReadBack(settings, wanted.log, environment | spec.environment)
        server = self._launch(command, environment, settings, wanted, port)
        try:
            proof = container_gpu.prove(server.container, self._uuids(settings))
            read_back = wait_ready(
                base_url, timeout_s=wanted.timeout_s, dead=server.death, read=read
            )
            check_settings(read_back, settings, nonce=nonce)
            _check_model(read_back, settings)
            if (reason := server.death()) is not None:
                raise ServerFailed(reason)
        except ServerFailed as error:
            died_with = server.exit_code()
            server.stop()
            raise ServerStartFailed(
                str(error),
                command=tuple(command),
                code=died_with,
                log=wanted.log,
                runtime="container",
            ) from error
        except BaseException:
            server.stop()
            raise
        return LiveServer(
            base_url=base_url,
            runtime="container",
            command=tuple(command),
            nonce=nonce,
            settings=read_back,
            start_seconds=round(time.monotonic() - begun, 3),
            process=server,
            log=wanted.log,
            image_digest=self.images[wanted.arm].digest,
            gpu_proof=proof,
            reread=read,
        )

    def _launch(
        self,
        command: list[str],
        environment: Mapping[str, str],
        settings: Settings,
        wanted: Wanted,
        port: int | None,
    ) -> ContainerServer:
        if wanted.arm not in self.images:
            self.prepare([wanted.arm], lambda line: None)
        spec = self.catalogue.server(wanted.arm)
        container = launch(
            self.client,
            Launch(
                spec=spec,
                image=self.images[wanted.arm],
                arm=wanted.arm,
                run_id=wanted.run_id,
                command=command,
                environment=environment,
                checkpoint=shown_path(settings),
                uuids=self._uuids(settings),
                port=port,
            ),
        )
        return ContainerServer(container, wanted.log, spec.memory)

    def _uuids(self, settings: Settings) -> list[str]:
        if settings["device"] != "cuda":
            return []
        return container_gpu.choose(container_gpu.host_uuids(self.environment), self.devices)


def _check_model(read_back: Mapping[str, Any], settings: Settings) -> None:
    if engine_of(settings).name != "vk":
        return  # it serves under a name of ours, which the nonce has proven
    wanted = Path(model_argument(settings)).name
    ids = [str(read_back.get("model")), *map(str, read_back.get("model_ids") or [])]
    if wanted not in (Path(i).name for i in ids):
        raise ServerFailed(f"the server serves {ids[0]!r}, asked for {wanted!r}")
