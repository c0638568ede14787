"""`name @ git+URL@COMMIT` and local paths become hashed wheels. Real git and uv, a build backend of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from lock_index import StandIn, build_wheel, make_plan, quiet, settings_for

from envforge.errors import OutsideError, UsageError
from envforge.lock import PipSettings, build_local, install_command, make_lock, probe_availability, write_lock

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not there")

BACKEND = """
import base64, hashlib, os, zipfile
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = "{module}-{version}-py3-none-any.whl"
    info = "{module}-{version}.dist-info"
    files = {{
        "{module}/__init__.py": open("{module}.py").read(),
        info + "/METADATA": "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n{requires}",
        info + "/WHEEL": "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }}
    record = "".join(path + ",,\\n" for path in [*files, info + "/RECORD"])
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as archive:
        for path, text in {{**files, info + "/RECORD": record}}.items():
            archive.writestr(zipfile.ZipInfo(path, (2024, 1, 1, 0, 0, 0)), text)
    return name
def build_sdist(*a): raise SystemExit("only wheels")
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")


def project(folder: Path, name: str = "own", version: str = "1.5", requires: str = "numpy<2") -> Path:
    """A source folder with a build backend of its own, so that nothing has to be downloaded to build it."""
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(f"VERSION = {version!r}\n", encoding="utf-8")
    line = f"Requires-Dist: {requires}\\n" if requires else ""
    code = textwrap.dedent(BACKEND).format(module=name, name=name, version=version, requires=line)
    (folder / "backend.py").write_text(code, encoding="utf-8")
    (folder / "pyproject.toml").write_text(
        f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n',
        encoding="utf-8",
    )
    return folder


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def repository(folder: Path, **options: str) -> tuple[str, str]:
    """-> git+file URL and the first commit; a second commit breaks the project."""
    project(folder, **options)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    commit = git(folder, "rev-parse", "HEAD")
    (folder / "backend.py").write_text("raise SystemExit('broken later')\n", encoding="utf-8")
    git(folder, "commit", "-q", "-a", "-m", "two")
    return f"git+{folder.as_uri()}", commit


def test_git_commit_and_path_are_locked_and_installed(tmp_path: Path) -> None:
    url, commit = repository(tmp_path / "repo")
    project(tmp_path / "src" / "tool", name="tool", version="2", requires="")
    lines = [f"own @ {url}@{commit}", "tool @ ./tool", "numpy"]
    lock_dir = tmp_path / "lock"
    with StandIn() as index:
        index.add("simple", "numpy", "1.26.4")
        index.add("simple", "numpy", "2.2.0")
        index.add("simple", "own", "1.5")  # the same version with other contents: must not be taken
        settings = settings_for(index)
        wheels = build_local(lines, lock_dir, settings, base=tmp_path / "src")
        assert [(wheel.name, wheel.version) for wheel in wheels] == [("own", "1.5"), ("tool", "2")]
        availability = probe_availability("cpu", settings, defaults={})
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        plan = make_plan({}, "cpu", python=python, requests=tuple(lines))
        made = make_lock(plan, availability, settings, local=wheels, wheel_folder=lock_dir / "wheels")
        assert {package.name: package.version for package in made.packages} == {
            "numpy": "1.26.4",
            "own": "1.5",
            "tool": "2",
        }
        assert made.package("own").hashes == (f"sha256:{wheels[0].sha256}",)  # type: ignore[union-attr]
        assert "--find-links ./wheels\n" in made.requirements
        assert 'path = "wheels/own-1.5-py3-none-any.whl"' in made.pylock
        assert str(tmp_path) not in made.pylock + made.requirements
        write_lock(made, lock_dir)
        moved = lock_dir.rename(tmp_path / "elsewhere")  # relative paths only
        argv, env = install_command(moved, settings, python=sys.executable, target=tmp_path / "site")
        done = subprocess.run(argv, env=env, cwd=moved, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "own" / "__init__.py").read_text() == "VERSION = '1.5'\n"


def test_building_again_gives_the_same_bytes_and_a_known_commit_is_kept(tmp_path: Path) -> None:
    url, commit = repository(tmp_path / "repo")
    first = build_local([f"own @ {url}@{commit}"], tmp_path / "a", PipSettings())
    second = build_local([f"own @ {url}@{commit}"], tmp_path / "b", PipSettings())
    assert first == second
    shutil.rmtree(tmp_path / "repo")
    assert build_local([f"own @ {url}@{commit}"], tmp_path / "a", PipSettings()) == first
    listed = sorted(path.name for path in (tmp_path / "a" / "wheels").iterdir())
    assert listed == ["built.json", "own-1.5-py3-none-any.whl"]


def test_a_wheel_that_is_no_longer_asked_for_goes(tmp_path: Path) -> None:
    project(tmp_path / "own")
    project(tmp_path / "tool", name="tool")
    build_local(["own @ ./own", "tool @ ./tool"], tmp_path / "lock", PipSettings(), base=tmp_path)
    build_local(["tool @ ./tool"], tmp_path / "lock", PipSettings(), base=tmp_path)
    assert not (tmp_path / "lock" / "wheels" / "own-1.5-py3-none-any.whl").exists()


def test_a_subdirectory_and_a_ready_wheel(tmp_path: Path) -> None:
    project(tmp_path / "repo" / "python")
    git(tmp_path / "repo", "init", "-q")
    git(tmp_path / "repo", "add", ".")
    git(tmp_path / "repo", "commit", "-q", "-m", "one")
    commit = git(tmp_path / "repo", "rev-parse", "HEAD")
    name, data = build_wheel("ready", "3")
    (tmp_path / name).write_bytes(data)
    url = f"git+{(tmp_path / 'repo').as_uri()}@{commit}#subdirectory=python"
    wheels = build_local([f"own @ {url}", f"ready @ ./{name}"], tmp_path / "lock", PipSettings(), base=tmp_path)
    assert [(wheel.name, wheel.version) for wheel in wheels] == [("own", "1.5"), ("ready", "3")]
    assert (tmp_path / "lock" / "wheels" / name).read_bytes() == data


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("own @ git+https://example.org/x.git@main", "full commit"),
        ("own @ git+https://example.org/x.git", "full commit"),
        ("own @ git+ext://x/sh@0000000000000000000000000000000000000000", "not supported"),
        ("own @ https://example.org/own-1.0-py3-none-any.whl", "only git"),
        ("own @ ./nowhere", "there is no"),
        ("other @ ./own", "is the package own"),
        ("own @ ./own/own.py", "neither a folder"),
    ],
)
def test_bad_addresses_are_said(tmp_path: Path, line: str, says: str) -> None:
    project(tmp_path / "own")
    with pytest.raises(UsageError, match=says):
        build_local([line], tmp_path / "lock", PipSettings(), base=tmp_path)
    assert not list((tmp_path / "lock").rglob("*.whl"))


def test_a_subdirectory_outside_is_refused(tmp_path: Path) -> None:
    url, commit = repository(tmp_path / "repo")
    with pytest.raises(UsageError, match="has no folder"):
        build_local([f"own @ {url}@{commit}#subdirectory=../.."], tmp_path / "lock", PipSettings())


def test_a_failed_build_and_an_unknown_commit_leave_nothing(tmp_path: Path) -> None:
    url, commit = repository(tmp_path / "repo")
    broken = git(tmp_path / "repo", "rev-parse", "HEAD")
    with pytest.raises(OutsideError) as caught:
        build_local([f"own @ {url}@{broken}"], tmp_path / "lock", PipSettings())
    assert (caught.value.id, caught.value.exit_code) == ("build", 3)
    assert "broken later" in caught.value.cause
    with pytest.raises(OutsideError) as caught:
        build_local([f"own @ {url}@{'0' * 40}"], tmp_path / "lock", PipSettings())
    assert caught.value.id == "git"
    assert list((tmp_path / "lock" / "wheels").iterdir()) == []
    assert commit != broken


def test_a_password_in_a_git_address_is_not_written_or_said(tmp_path: Path) -> None:
    with StandIn() as index:  # answers 404 to git
        url = f"git+{index.url}/x.git".replace("//", "//anna:tops3cret@")
        with pytest.raises(OutsideError) as caught:
            build_local([f"own @ {url}@{'0' * 40}"], tmp_path / "lock", PipSettings())
    assert "tops3cret" not in caught.value.render()
    assert caught.value.id == "git"


def test_the_record_is_plain(tmp_path: Path) -> None:
    project(tmp_path / "own")
    (wheel,) = build_local(["own @ ./own"], tmp_path / "lock", PipSettings(), base=tmp_path)
    rows = json.loads((tmp_path / "lock" / "wheels" / "built.json").read_text(encoding="utf-8"))
    assert rows == [{"name": "own", "version": "1.5", "file": wheel.file, "sha256": wheel.sha256, "source": "own"}]


def test_the_folder_of_the_lock_may_be_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path / "mine" / "own")
    url, commit = repository(tmp_path / "repo", name="tool")
    monkeypatch.chdir(tmp_path)
    wheels = build_local(["own @ ./own", f"tool @ {url}@{commit}"], Path("mine"), PipSettings(), base=Path("mine"))
    assert all((tmp_path / "mine" / "wheels" / wheel.file).is_file() for wheel in wheels)
    assert len(wheels) == 2


def test_a_stand_in_of_a_manager_is_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pyenv puts on PATH for a Python that is not the chosen one."""
    shim = tmp_path / "bin" / "python3.99"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.99: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}{os.pathsep}{os.environ['PATH']}")
    project(tmp_path / "own")
    assert len(build_local(["own @ ./own"], tmp_path / "lock", PipSettings(), base=tmp_path, python="3.99")) == 1


def test_another_python_builds_what_is_not_compiled(tmp_path: Path) -> None:
    """The plan's Python need not be on this machine (3.99 is on none)."""
    project(tmp_path / "own")
    (wheel,) = build_local(["own @ ./own"], tmp_path / "lock", PipSettings(), base=tmp_path, python="3.99")
    assert wheel.file == "own-1.5-py3-none-any.whl"
    backend = tmp_path / "own" / "backend.py"
    backend.write_text(backend.read_text().replace("py3-none-any.whl", "cp311-cp311-linux_x86_64.whl"))
    with pytest.raises(OutsideError, match=r"holds compiled code, and Python 3\.99 is not on this machine"):
        build_local(["own @ ./own"], tmp_path / "other", PipSettings(), base=tmp_path, python="3.99")
