"""What `job slurm` and `job kubernetes` share means the same to both: the proof's words, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envforge.cli.app import application
from envforge.cli.run import run
from envforge.errors import DataError
from envforge.jobs.manifest import manifests
from envforge.jobs.model import JobSpec, Pod
from envforge.jobs.slurm import render

IMAGE = "registry.example/train@sha256:" + "ab" * 32


def job(**changes: Any) -> JobSpec:
    return JobSpec(**{"name": "train", "image": IMAGE, "command": ("python",), "output": "/o", **changes})


@pytest.mark.parametrize(
    ("words", "full"),
    [((), True), (("--grade=static",), False), (("--steps", "3"), True), (("--grade", "full"), False)],
)
def test_both_ask_for_the_full_proof(words: tuple[str, ...], full: bool) -> None:
    spec = job(verify=True, command=words)
    args = manifests(spec)[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args == ["verify", *(["--grade=full"] if full else []), *words]
    script = "".join(f"    {word}\n" for word in ["verify", "--json=@", *args[1:]])
    assert f"command=(\n{script}" in render(spec, "docker")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"env": {"HF_TOKEN": "hf_" + "a" * 34}}, "env HF_TOKEN: looks like a secret"),
        ({"env": {"X": "https://user:word@host/"}}, "env X: looks like a secret"),
        ({"command": ("python", "t.py", "--api-key", "abcdefgh12345678")}, "command: holds something"),
        ({"command": ("python", "t.py", "--password=abcdefgh")}, "command: holds something"),
        ({"time_minutes": 2}, "signal seconds: 120 leave nothing of 2 minutes"),
        ({"env": {"LD_LIBRARY_PATH": "/x"}}, "would change which libraries"),
        ({"verify": True, "tasks_per_node": 2}, "the proof runs once per node"),
    ],
)
def test_both_refuse_the_same(changes: dict[str, Any], told: str) -> None:
    for make in (lambda spec: render(spec, "docker"), lambda spec: manifests(spec)):
        with pytest.raises(DataError) as error:
            make(job(**changes))
        assert told in error.value.cause
    if "HF_TOKEN" in changes.get("env", {}):
        with pytest.raises(DataError, match="--secret HF_TOKEN=SECRET/KEY"):
            manifests(job(pod=Pod(), **changes))


@pytest.mark.parametrize("name", ["A) touch HIT;;", "$(touch HIT)", "A=b/c", "LD_PRELOAD", ""])
def test_a_secret_of_slurm_is_a_variables_name(name: str) -> None:
    with pytest.raises(DataError, match="a variable of whoever submits"):
        render(job(secrets=(name,)), "docker")


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """One line for each scheduler; -> exit code and what was told. Neither is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(kind: str, *words: str) -> tuple[int, str]:
        own = ["--container-tool", "docker"] if kind == "slurm" else []
        code = run(application(), ["job", kind, IMAGE, *own, *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_the_command_line_refuses_the_same_of_both(line: Any, kind: str) -> None:
    code, said = line(kind, "--submit", "--pass", "NOT_SET_HERE", "--", "python")
    assert code == 2 and "--pass NOT_SET_HERE: it is not set here" in said
    code, said = line(kind, "--verify")
    assert code == 2 and "the proof needs a model, and none is named" in said
    for words in (("--env", "ENVFORGE_MODEL=/m"), ("--", "--model", "/m"), ("--", "--grade=static")):
        code, said = line(kind, "--verify", *words)
        assert code == 0, said
