"""What a project folder holds after `envforge build`, also when the registry refuses. Stood in for: the build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envforge.cli import outcome
from envforge.cli.build import build
from envforge.cli.planned import Around, Found
from envforge.errors import EngineError, UsageError
from envforge.image.engines import choose_engine, container_engine
from envforge.image.registry import RegistryError
from envforge.image.state import users
from envforge.image.values import BuildResult, InstallSource
from envforge.resolver.plan import Plan, Target
from envforge.spec import Spec

PLAN = Plan("3.11", "cpu", "cpu", {"torch": "2.13.0"}, ("torch",), Target("x86_64", None, None, None))
DIGEST = f"sha256:{'d' * 64}"
PUSHED = {"reference": "r.example/x:1", "digest": DIGEST, "image": f"r.example/x@{DIGEST}", "pushed": True}


class Lock:
    requirements, pylock, hash = "", "lock-version = '1.0'\n", "l" * 64


class Engine:
    name = "docker"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose plan stands; `result` or an error is what the build comes to."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ENVFORGE_REGISTRY", "r.example/team")
    folder = tmp_path / "project"
    folder.mkdir()
    found = Found(PLAN, Lock(), Spec(name="x"), InstallSource(""), (), folder)  # type: ignore[arg-type]
    monkeypatch.setattr("envforge.image.engines.choose_engine", lambda *a: Engine())
    monkeypatch.setattr("envforge.cli.planned.surroundings", lambda *a: Around())
    monkeypatch.setattr("envforge.cli.planned.find_plan", lambda *a, **k: found)
    return folder


def result(**changes: Any) -> BuildResult:
    values: dict[str, Any] = {
        "engine": "docker", "reference": "envforge/x:1", "digest": "sha256:i", "address": "a" * 64, "reused": False,
        "seconds": 1.0, "size": 5, "registry": PUSHED,
    }  # fmt: skip
    return BuildResult(**{**values, **changes})


def test_the_digest_in_the_registry_is_kept_and_the_project_is_known_to_use_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def made(plan: object, lock: object, spec: object, options: object, **more: object) -> BuildResult:
        asked.append(options)
        return result()

    monkeypatch.setattr("envforge.image.build.build_plan", made)
    build(["x"], push=True, json_=False)
    assert (asked[0].registry, asked[0].push) == ("r.example/team", True)
    kept = json.loads((project / "build.json").read_text())
    assert kept["registry"] == PUSHED
    assert kept["plan_hash"] == PLAN.hash()
    assert f"pushed as r.example/x@{DIGEST}" in capsys.readouterr().out
    state = next((project.parent / "state").rglob("used-by.json")).parent
    assert users(state, "a" * 64) == (project.resolve(),)
    assert users(state, "b" * 64) == ()


@pytest.mark.parametrize("built", [True, False], ids=["after the build", "before it"])
def test_a_registry_that_refuses_leaves_the_plan_and_what_was_built(
    project: Path, monkeypatch: pytest.MonkeyPatch, built: bool
) -> None:
    def refused(*words: object, **more: object) -> BuildResult:
        error = RegistryError("the registry refused: no room", "log in")
        error.kept = result(registry=None) if built else None
        raise error

    monkeypatch.setattr("envforge.image.build.build_plan", refused)
    with pytest.raises(RegistryError) as error:
        build(["x"], push=True)
    assert error.value.exit_code == 3
    assert (project / "plan.json").read_text() == PLAN.dumps()
    assert (project / "pylock.toml").is_file()
    assert (project / "build.json").is_file() is built
    if built:
        assert json.loads((project / "build.json").read_text())["registry"] is None


def test_what_is_not_proven_is_not_pushed(project: Path) -> None:
    with pytest.raises(UsageError, match="proven"):
        build(["x"], push=True, no_verify=True)


def test_the_run_command_is_the_engines_own() -> None:
    assert outcome.run_line(result(), True).startswith("docker run --rm --gpus all --shm-size")
    assert "--device nvidia.com/gpu=all" in outcome.run_line(result(engine="podman"), True)


def test_auto_takes_the_engine_that_answers_and_a_named_folder_means_venv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stood in for: podman, by a script that knows `info` only."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_engine("auto").name == "venv"
    podman = tmp_path / "podman"
    podman.write_text("""#!/bin/sh\n[ "$1" = info ] && echo '{"version": {"Version": "5.0"}}'\n""")
    podman.chmod(0o755)
    assert choose_engine("auto").name == "podman"
    assert choose_engine("auto", tmp_path / "place").name == "venv"
    with pytest.raises(EngineError, match="buildah is not installed"):
        choose_engine("buildah")
    with pytest.raises(UsageError, match="folder"):
        container_engine(choose_engine("venv", tmp_path))
