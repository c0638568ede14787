"""What an image build takes out of wheels, and what it must leave: on folders laid out as wheels lay them out."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from envforge.image.render import TEMPLATES, may_compile
from envforge.resolver.plan import Plan, Target
from envforge.spec import Spec

SLIM = TEMPLATES / "image" / "slim.py"
GONE = {
    "torch": ("torch/bin/test_api", "torch/bin/protoc-3.13", "torch/bin/HashStoreTest", "torch/test/cpp/x.cpp",
              "torch/lib/libx.a", "torch/fx/tests/test_x.py", "torch-2.dist-info/uv_cache.json"),
    "pandas": ("pandas/tests/test_a.py", "pandas/tests/data/a.csv"),
}  # fmt: skip
HEADERS = ("torch/include/ATen/ATen.h", "torch/include/c10/test/util.h")
KEPT = {
    "torch": ("torch/__init__.py", "torch/bin/torch_shm_manager", "torch/bin/ptxas", "torch/testing/__init__.py",
              "torch/fx/tests/COPYING", "torch/include/gen.py", "torch-2.dist-info/licenses/x/test/LICENSE"),
    "pandas": ("pandas/__init__.py", "pandas/core/test.py", "pandas/io/tests/__init__.py", "pandas/io/tests/used.py"),
}  # fmt: skip


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """An environment of two packages; one module imports something out of a folder of tests."""
    site = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    for name in ("torch", "pandas"):
        info = site / f"{name}-2.dist-info"
        files = [*GONE[name], *KEPT[name], *(HEADERS if name == "torch" else ())]
        for file in (*files, f"{info.name}/METADATA"):
            path = site / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2\n" if "METADATA" in file else "# x\n")
        rows = [[file, "sha256=x", "4"] for file in files] + [[f"{info.name}/RECORD", "", ""]]
        with (info / "RECORD").open("w", newline="") as stream:
            csv.writer(stream).writerows(rows)
    (site / "pandas/__init__.py").write_text("from .io.tests.used import (\n    helper,\n)\n")
    (site / "pandas/core/__pycache__").mkdir()
    (site / "pandas/core/__pycache__/test.cpython-311.pyc").write_text("x")
    return tmp_path / "env"


def slim(env: Path, headers: str, *parts: Path) -> set[str]:
    """Run it; returns the files that are left."""
    done = subprocess.run(
        [sys.executable, "-I", "-B", str(SLIM), str(env), headers, *map(str, parts)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "taken out" in done.stdout
    site = env / "lib/python3.11/site-packages"
    return {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}


def test_what_nothing_imports_goes_and_licences_stay(env: Path) -> None:
    left = slim(env, "no-headers")
    assert not left & {*GONE["torch"], *GONE["pandas"], *HEADERS, "pandas/core/__pycache__/test.cpython-311.pyc"}
    assert left >= {*KEPT["torch"], *KEPT["pandas"]}
    assert not (env / "lib/python3.11/site-packages/pandas/tests").exists()


def test_record_lists_what_is_left(env: Path) -> None:
    left = slim(env, "no-headers")
    site = env / "lib/python3.11/site-packages"
    for record in site.glob("*.dist-info/RECORD"):
        with record.open(newline="") as stream:
            assert {row[0] for row in csv.reader(stream)} <= left


def test_headers_stay_where_something_may_compile(env: Path) -> None:
    assert slim(env, "keep-headers") >= set(HEADERS)


def test_a_part_touches_its_own_packages_only(env: Path, tmp_path: Path) -> None:
    part = tmp_path / "requirements.txt"
    part.write_text("Pandas==2 \\\n    --hash=sha256:00\n")
    left = slim(env, "no-headers", part)
    assert left >= {*GONE["torch"], *HEADERS}
    assert not left & set(GONE["pandas"])


def test_who_may_compile() -> None:
    target = Target(arch="x86_64", glibc=None, driver=None, driver_floor=None)
    cpu = Plan(python="3.11", variant="cpu", tier="cpu", pins={}, requests=(), target=target)
    assert not may_compile(cpu, Spec(name="x", system_packages=("libgcc-s1", "ffmpeg")))
    for package in ("gcc", "g++-12", "clang=1:14.0", "build-essential"):
        assert may_compile(cpu, Spec(name="x", system_packages=(package,)))
    gpu = Plan(python="3.11", variant="cu126", tier="minor", pins={}, requests=(), target=target)
    assert may_compile(gpu, Spec(name="x"))
