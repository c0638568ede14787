"""The venv engine: a folder with the same lock, entrypoint and seal. Needs uv and a Python, no container."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from engine_index import make_wheel
from standins import DEMO, FILELOCK, TORCH, WHEELS, lock_of, make_plan, make_spec, offline, options

from envforge.errors import EngineError, HashMismatchError, OutsideError, UsageError
from envforge.image.build import build_plan
from envforge.image.engines import make_engine
from envforge.image.engines.venv import MARKER, VenvEngine, sealed_environment
from envforge.image.values import BuildResult

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def build(place: Path, tmp: Path, *wheels: object, **changes: object) -> BuildResult:
    """One environment of stand-ins for the running interpreter's version."""
    own = wheels or WHEELS
    source = offline(tmp / "wheels", *own)  # type: ignore[arg-type]
    lock = lock_of(*own)  # type: ignore[arg-type]
    made = options(source, engine="venv", output=place, base=sys.executable, state=tmp / "state", **changes)
    return build_plan(make_plan(python=PYTHON), lock, make_spec(), made)


def inside(place: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command through the entrypoint, in a hostile environment."""
    hostile = {**os.environ, "PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere", "LD_LIBRARY_PATH": "/nowhere", **env}
    argv = [str(place / "bin" / "envforge-entrypoint"), *words]
    return subprocess.run(argv, capture_output=True, text=True, env=hostile, check=False)


def test_a_folder_holds_what_an_image_holds(tmp_path: Path) -> None:
    place = tmp_path / "place"
    result = build(place, tmp_path)
    assert (result.engine, result.reference, result.reused) == ("venv", str(place), False)
    for name in ("plan.json", "pylock.toml", "requirements.txt", "verify.json", "bin/envforge-entrypoint", "receipts"):
        assert (place / name).exists(), name
    script = (
        "import torch, demo_stack, envforge.verify, sys, os;"
        "print(torch.__version__, sys.prefix, os.environ.get('LD_LIBRARY_PATH'))"
    )
    answer = inside(place, "python", "-c", script)
    assert answer.stdout.split() == ["2.13.0+cpu", str(place / "env"), "None"], answer.stderr
    kept = inside(place, "sh", "-c", "echo $LD_LIBRARY_PATH", ENVFORGE_KEEP_LIBRARY_PATH="1")
    assert kept.stdout.strip() == "/nowhere"
    assert inside(place, "sh", "-c", "exit 42").returncode == 42


def test_what_is_published_as_source_only_is_built_and_nothing_else(tmp_path: Path) -> None:
    """Its build code needs nothing: it hands out a wheel that lies in the archive."""
    wheel = make_wheel("only-source", "1.0")
    backend = (
        f"import shutil\ndef build_wheel(to, *_):\n    shutil.copy('{wheel.file}', to)\n    return '{wheel.file}'\n"
    )
    files = {
        "pyproject.toml": b"[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
        "backend.py": backend.encode(),
        "PKG-INFO": wheel.metadata,
        wheel.file: wheel.data,
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"only_source-1.0/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    houses = offline(tmp_path / "wheels", *WHEELS)
    (tmp_path / "wheels" / "only_source-1.0.tar.gz").write_bytes(packed.getvalue())
    line = f"only-source==1.0 \\\n    --hash=sha256:{hashlib.sha256(packed.getvalue()).hexdigest()}\n"
    said = "# only-source is built from source when it is installed\n"
    place = tmp_path / "place"
    made = options(houses, engine="venv", output=place, base=sys.executable, state=tmp_path / "state")
    plan = make_plan(python=PYTHON)
    with pytest.raises(OutsideError):
        build_plan(
            plan, replace(lock_of(*WHEELS), requirements=lock_of(*WHEELS).requirements + line), make_spec(), made
        )
    build_plan(
        plan, replace(lock_of(*WHEELS), requirements=lock_of(*WHEELS).requirements + said + line), make_spec(), made
    )
    assert inside(place, "python", "-c", "import torch, only_source").returncode == 0


def test_it_can_be_moved(tmp_path: Path) -> None:
    build(tmp_path / "place", tmp_path)
    (tmp_path / "place").rename(tmp_path / "moved")
    answer = inside(tmp_path / "moved", "python", "-c", "import torch; print(torch.__file__)")
    assert answer.stdout.startswith(str(tmp_path / "moved")), answer.stderr


def test_the_same_again_is_found_and_another_lock_replaces_it(tmp_path: Path) -> None:
    place = tmp_path / "place"
    first = build(place, tmp_path)
    (place / "receipts" / "old.json").write_text("{}")
    assert build(place, tmp_path).reused
    # Over an environment that holds +cpu, one that the lock says is +cu126: nothing of the old one may stay.
    other = make_wheel("torch", "2.13.0+cu126")
    second = build(place, tmp_path, FILELOCK, other)
    assert not second.reused
    assert second.digest != first.digest
    script = "import importlib.util as u, torch; print(torch.__version__, u.find_spec('demo_stack'))"
    assert inside(place, "python", "-c", script).stdout.split() == ["2.13.0+cu126", "None"]
    assert (place / "receipts" / "old.json").exists()
    assert sorted(p.name for p in place.glob(".env*")) == [".envforge.lock"]


def test_leftovers_and_half_environments_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    place = tmp_path / "place"
    build(place, tmp_path)
    (place / ".env.building-dead").mkdir()
    (place / ".env.old-1").mkdir()
    (place / "env" / MARKER).unlink()
    assert not build(place, tmp_path).reused
    assert not list(place.glob(".env.*"))
    (place / "env" / "bin" / "python").unlink()
    assert not build(place, tmp_path).reused


def test_a_wheel_that_is_not_the_locks_stops_the_build_and_keeps_the_old(tmp_path: Path) -> None:
    place = tmp_path / "place"
    build(place, tmp_path)
    # A find-links folder of uv's own arguments, so that the wrong file reaches uv at all.
    folder = tmp_path / "bad"
    folder.mkdir()
    for wheel in WHEELS:
        (folder / wheel.file).write_bytes(make_wheel(wheel.name, wheel.version, {"evil.py": b"x"}).data)
    source = replace(offline(tmp_path / "none"), arguments=("--no-index", "--find-links", str(folder), "--no-cache"))
    made = options(source, engine="venv", output=place, base=sys.executable, state=tmp_path / "state", rebuild=True)
    with pytest.raises(HashMismatchError) as error:
        build_plan(make_plan(python=PYTHON), lock_of(*WHEELS), make_spec(), made)
    assert error.value.exit_code == 3
    assert inside(place, "python", "-c", "import torch, demo_stack").returncode == 0
    assert not list(place.glob(".env.*"))


def test_a_python_that_is_not_here_is_told_with_the_ways_on(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as error:
        VenvEngine(tmp_path).base("", "3.5")
    assert error.value.id == "no-python"
    assert "3.5" in error.value.cause
    assert "--python" in error.value.hint
    with pytest.raises(EngineError):
        VenvEngine(tmp_path).base(sys.executable, "3.5")


def test_a_folder_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        _ = make_engine("venv").find("envforge.address", "x")
    with pytest.raises(UsageError):
        make_engine("podmann")


def test_the_sealed_environment_lets_nothing_of_python_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "CONDA_PREFIX", "PIP_TARGET", "MY_TOKEN"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    sealed = sealed_environment()
    assert "/nowhere" not in sealed.values()
    assert sealed["CUDA_VISIBLE_DEVICES"] == "1"
    assert sealed["PYTHONNOUSERSITE"] == "1"


def test_the_entrypoint_goes_elsewhere_when_its_cache_cannot_be_written(tmp_path: Path) -> None:
    place = tmp_path / "place"
    build(place, tmp_path)
    (place / "cache").rmdir()
    script = (
        "import json, os; print(json.dumps({n: os.environ.get(n) for n in ('TRITON_CACHE_DIR', 'HF_HOME', 'TMPDIR')}))"
    )
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    answer = inside(place, "python", "-c", script, TMPDIR=str(tmp), HF_HOME="/data/hf")
    found = json.loads(answer.stdout)
    assert found["TRITON_CACHE_DIR"].startswith(f"{tmp}/envforge-cache.")
    assert found["HF_HOME"] == "/data/hf"  # what the caller mounted stays


def test_demo_is_only_there_through_the_lock(tmp_path: Path) -> None:
    build(tmp_path / "place", tmp_path, TORCH, FILELOCK)
    assert inside(tmp_path / "place", "python", "-c", f"import {DEMO.name.replace('-', '_')}").returncode == 1
