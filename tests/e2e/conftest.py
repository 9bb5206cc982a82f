"""Container fixtures: one dockerd a session, empty before and after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_daemon import Daemon, environment_for, images_file, install_dockerd, running_daemon


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """One dockerd for the session, installed when it is missing."""
    if os.geteuid() != 0:
        pytest.skip("a dockerd of its own needs root")
    install_dockerd()
    with running_daemon() as found:
        yield found


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Daemon]:
    """The dockerd, empty before and after each test."""
    assert daemon.containers() == []
    yield daemon
    left = daemon.containers()
    for container in daemon.client.containers.list(all=True, ignore_removed=True):
        container.remove(force=True, v=True)
    assert left == []


@pytest.fixture
def environment(engine: Daemon, tmp_path: Path) -> dict[str, str]:
    """What a run in containers of `engine` needs."""
    return environment_for(engine.url, images_file(tmp_path))
