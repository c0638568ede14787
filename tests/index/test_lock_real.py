"""The lock against the configured package index. Versions are pinned; what the index adds later may change the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envforge.lock import (
    Lock,
    LockConflict,
    PipSettings,
    install_command,
    make_lock,
    probe_availability,
    read_pip_settings,
    run_uv,
    write_lock,
)
from envforge.lock.availability import CUDA_NAMES
from envforge.resolver.plan import Plan, Target

pytestmark = pytest.mark.index


@pytest.fixture(scope="module")
def settings() -> PipSettings:
    return read_pip_settings(os.environ)


def plan(pins: dict[str, str], variant: str, python: str = "3.11", **changes: object) -> Plan:
    target = Target("x86_64", "2.31", None, None)
    changes.setdefault("requests", tuple(pins))
    return Plan(python=python, variant=variant, tier="native", pins=pins, target=target, **changes)  # type: ignore[arg-type]


def lock(plan: Plan, settings: PipSettings) -> Lock:
    return make_lock(plan, probe_availability(plan.variant, settings), settings)


def versions(made: Lock) -> dict[str, str]:
    return {package.name: package.version for package in made.packages}


def test_a_cuda_plan_of_the_default_index_is_locked_from_metadata_alone(settings: PipSettings, tmp_path: Path) -> None:
    before = os.environ.get("UV_CACHE_DIR")
    os.environ["UV_CACHE_DIR"] = str(tmp_path)
    try:
        made = lock(plan({"torch": "2.13.0", "peft": "0.19.1"}, "cu130", "3.12"), settings)
    finally:
        if before is None:
            del os.environ["UV_CACHE_DIR"]
        else:
            os.environ["UV_CACHE_DIR"] = before
    got = versions(made)
    assert got["torch"] == "2.13.0"
    assert got["nvidia-nccl-cu13"]
    assert made.size > 2e9
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
    assert stored < 100e6
    assert "download.pytorch.org" not in made.requirements


def test_a_default_variant_of_its_day(settings: PipSettings) -> None:
    got = versions(lock(plan({"torch": "2.6.0"}, "cu124"), settings))
    assert got["torch"] == "2.6.0"
    assert got["nvidia-cudnn-cu12"] == "9.1.0.70"
    assert got["triton"] == "3.2.0"


def test_a_dated_closure_is_of_its_time(settings: PipSettings) -> None:
    """torch and what it needs (setuptools here) are let past the date; the rest is of September 2024."""
    made = lock(
        plan(
            {
                "torch": "2.13.0",
                "transformers": "4.44.2",
                "peft": "0.12.0",
                "accelerate": "0.34.2",
                "datasets": "2.21.0",
            },
            "cu130",
            as_of="2024-09-21",
            undated=("torch",),
            constraints=("pyarrow<26",),
        ),
        settings,
    )
    got = versions(made)
    assert (got["numpy"], got["tokenizers"], got["pyarrow"]) == ("2.1.1", "0.19.1", "17.0.0")
    assert "setuptools" in made.exempted
    late = {  # CUDA comes with torch
        package.name for package in made.packages if package.uploaded and package.uploaded > "2024-09-21"
    }
    assert late <= {*made.exempted, "torch", *CUDA_NAMES}


def test_a_source_archive_of_the_matrix_is_locked_unbuilt(settings: PipSettings) -> None:
    made = lock(plan({"deepspeed": "0.15.4", "torch": "2.6.0"}, "cu124", source_only=("deepspeed",)), settings)
    package = made.package("deepspeed")
    assert package is not None
    assert (package.kind, package.version) == ("source", "0.15.4")
    assert {"hjson", "ninja", "pydantic"} <= set(versions(made))


def test_a_real_conflict(settings: PipSettings) -> None:
    with pytest.raises(LockConflict) as caught:
        lock(
            plan({"peft": "0.19.1", "accelerate": "0.20.0", "datasets": "2.21.0", "torch": "2.6.0"}, "cu124"), settings
        )
    assert caught.value.pins == {"accelerate": "0.20.0", "peft": "0.19.1"}


def test_a_small_lock_installs_and_imports(settings: PipSettings, tmp_path: Path) -> None:
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    made = lock(plan({"safetensors": "0.5.3"}, "cpu", python, requests=("safetensors", "packaging")), settings)
    write_lock(made, tmp_path)
    argv, env = install_command(tmp_path, settings, python=sys.executable, target=tmp_path / "site")
    result = run_uv(argv[1:], env=env, cwd=tmp_path, timeout=120)
    assert result.code == 0, result.words
    done = subprocess.run(
        [sys.executable, "-c", "import safetensors; print(safetensors.__version__, safetensors.__file__)"],
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("0.5.3 ")
    assert str(tmp_path) in done.stdout


def test_pip_installs_the_lock_too(settings: PipSettings, tmp_path: Path) -> None:
    """The file is plain: `pip install --require-hashes -r requirements.txt`."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    made = lock(plan({"safetensors": "0.5.3"}, "cpu", python), settings)
    write_lock(made, tmp_path)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), "-r", str(tmp_path / "requirements.txt")], check=True)
    assert (tmp_path / "site" / "safetensors").is_dir()
