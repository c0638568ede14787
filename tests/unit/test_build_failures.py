"""The output of failed builds, as engines and uv print it, and what each means."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from envforge.errors import (
    DiskFullError,
    EngineError,
    EnvforgeError,
    HashMismatchError,
    IndexUnreachableError,
    OutsideError,
)
from envforge.image.engines.dockercli import DockerClient, candidates, find_client, probe
from envforge.image.failures import explain

END = "executor failed running [/bin/sh /run/envforge/scripts/install.sh part]: exit code: 2"
CASES: list[tuple[str, type[EnvforgeError], str]] = [
    ("#8 9.1 error: failed to write to file: No space left on device (os error 28)", DiskFullError, "disk"),
    ("Error response from daemon: write /var/lib/x: no space left on device", DiskFullError, "disk"),
    ("error during connect: Post http://docker: EOF", EngineError, "engine went away"),
    ("rpc error: code = Unavailable desc = closing transport", EngineError, "engine went away"),
    ("Cannot connect to the Docker daemon at unix:///x.sock. Is the docker daemon running?", EngineError, "went away"),
    ("#8 1.2   cause: Hash mismatch for `torch==2.13.0+cpu`", HashMismatchError, "torch==2.13.0+cpu"),
    ("#8 1.2 error: Failed to download `torch==2.6.0`\n#8 1.2   cause: end of file", IndexUnreachableError, "torch"),
    ("#8 1.2 error: Request failed after 3 retries\n#8 1.2   cause: dns error", IndexUnreachableError, "dns error"),
    ("#8 1.2 × No solution found when resolving: because torch==9 was not found", IndexUnreachableError, "torch==9"),
    ("#8 1.2 E: Unable to locate package libnothing1", OutsideError, "libnothing1"),
    ("failed to solve: x:y: pull access denied, repository does not exist", OutsideError, "base image"),
    ("#8 1.2 error: something new", OutsideError, "something new"),
    ("#8 1.2 error: fetching http://user:s3cr3t@host/x: error sending request", IndexUnreachableError, "http://host/x"),
]


@pytest.mark.parametrize(("text", "kind", "words"), CASES, ids=[case[0][:40] for case in CASES])
def test_the_cause_is_told_apart(text: str, kind: type[EnvforgeError], words: str) -> None:
    error = explain([*text.splitlines(), END] if text.startswith("#8") else text.splitlines(), Path("build.log"))
    assert type(error) is kind, error
    assert error.exit_code == 3
    assert words in error.cause
    assert "s3cr3t" not in error.render()
    assert "build.log" in error.hint
    assert len(error.render().splitlines()) <= 6


def client(folder: Path, version: str, buildx: bool) -> Path:
    """A docker client as far as probing goes: it says its version, and buildx's if it has it."""
    folder.mkdir()
    answer = "echo github.com/docker/buildx v0.12.0" if buildx else "exit 1"
    path = folder / "docker"
    path.write_text(
        f'#!/bin/sh\ncase $1 in --version) echo "Docker version {version}, build x" ;; buildx) {answer} ;; esac\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_clients_are_told_apart_by_what_they_can_do(tmp_path: Path) -> None:
    old = client(tmp_path / "old", "20.10.24+dfsg1", False)
    bare = client(tmp_path / "bare", "28.2.2", False)
    full = client(tmp_path / "full", "28.2.2", True)
    assert probe(old) == DockerClient(old, "20.10.24+dfsg1", False)
    assert probe(full) == DockerClient(full, "28.2.2", True)
    assert "no buildx" in str(probe(bare))
    assert "does not answer" in str(probe(tmp_path / "nobody"))


def test_the_first_client_on_path_that_works_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = client(tmp_path / "bare", "28.2.2", False)
    old = client(tmp_path / "old", "20.10.24", False)
    monkeypatch.delenv("ENVFORGE_DOCKER", raising=False)
    monkeypatch.setenv("PATH", f"{bare.parent}:{old.parent}:/usr/bin:/bin")
    assert candidates()[:2] == [bare, old]
    assert find_client().path == old


def test_no_client_that_works_says_why_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVFORGE_DOCKER", str(client(tmp_path / "bare", "28.2.2", False)))
    with pytest.raises(EngineError) as error:
        find_client()
    assert error.value.id == "no-buildkit-client"
    assert "28.2.2" in error.value.cause
