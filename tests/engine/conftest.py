"""One private docker engine for the whole run, with a base image made by debootstrap; stopped by its process id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_base import import_base
from engine_daemon import CannotStart, Daemon, private_daemon
from slurm_cluster import CannotStart as SlurmCannotStart
from slurm_cluster import Slurm, private_slurm

from envforge.image.engines.docker import DockerEngine


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """The engine of this run."""
    try:
        with private_daemon() as own:
            yield own
    except CannotStart as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def base_image(daemon: Daemon) -> str:
    """Reference of the base image in the private engine."""
    try:
        return import_base(daemon)
    except CannotStart as reason:
        pytest.skip(str(reason))


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No docker configuration, build state or package settings of the user reach a test, and none of its get out."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "SOURCE_DATE_EPOCH", "ENVFORGE_DOCKER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def engine(daemon: Daemon, base_image: str, sealed: Path, monkeypatch: pytest.MonkeyPatch) -> DockerEngine:
    """envforge's docker engine, talking to the private one, with the base image in it."""
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    return DockerEngine()


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """The Slurm of this run: two nodes on this machine."""
    try:
        with private_slurm() as cluster:
            yield cluster
    except SlurmCannotStart as reason:
        pytest.skip(str(reason))
