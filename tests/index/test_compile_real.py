"""The folder engine's compile stage on a real source archive, whose build code needs the stage's own tools."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from envforge.cli.source import install_source
from envforge.image.build import build_plan
from envforge.image.values import BuildOptions
from envforge.lock import index_arguments, read_pip_settings, run_uv
from envforge.lock.settings import uv_environment
from envforge.resolver.plan import Plan, Target
from envforge.spec import Spec

pytestmark = pytest.mark.index
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class PlainLock:
    """What a build needs of a lock; its one line comes from uv."""

    requirements: str
    hash: str = "0" * 64
    pylock: str = "lock-version = '1.0'\n"


def test_a_source_archive_is_compiled_and_its_tools_stay_out(tmp_path: Path) -> None:
    """func-timeout has no wheel and an old setup.py: `bdist_wheel` comes from the tools beside the environment."""
    settings = read_pip_settings(os.environ)
    (tmp_path / "in.txt").write_text("func-timeout==4.3.5\n")
    words = ["pip", "compile", "in.txt", "--generate-hashes", "--no-header", "--no-annotate"]
    env = uv_environment(settings)
    made = run_uv([*words, *index_arguments(settings)], env=env, cwd=tmp_path, timeout=120)
    assert made.code == 0, made.words
    place = tmp_path / "place"
    target = Target(arch="x86_64", glibc=None, driver="550.54.15", driver_floor="525.60.13", sm=("8.0",))
    plan = Plan(
        python=PYTHON,
        variant="cu126",
        tier="minor",
        cuda="12.6",
        pins={"func-timeout": "4.3.5"},
        requests=("func-timeout",),
        target=target,
        source_only=("func-timeout",),
    )
    options = BuildOptions(
        source=install_source(settings, None), verify=False, engine="venv", output=place, base=sys.executable,
        state=tmp_path / "state",
    )  # fmt: skip
    build_plan(plan, PlainLock(made.stdout), Spec(name="demo"), options)
    python = str(place / "env" / "bin" / "python")
    assert subprocess.run([python, "-c", "import func_timeout"], check=False).returncode == 0
    assert subprocess.run([python, "-c", "import wheel"], capture_output=True, check=False).returncode != 0
