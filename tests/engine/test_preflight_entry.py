"""The preflight at an image's door: what the entrypoint lets through, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from environment_folder import CPU, GPU, make_environment, record_node

pytestmark = pytest.mark.engine


def enter(root: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command through the entrypoint."""
    argv = [str(root / "bin" / "envforge-entrypoint"), *words]
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("ENVFORGE_")}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env={**surroundings, **env}, timeout=60)


def test_an_image_for_gpus_refuses_a_node_that_cannot_run_it(tmp_path: Path) -> None:
    root = make_environment(tmp_path / "image", GPU)
    good, old = record_node(tmp_path / "good"), record_node(tmp_path / "old", driver="470.57.02")
    marker = tmp_path / "ran"
    refused = enter(root, "touch", str(marker), ENVFORGE_RECORDED=str(old))
    assert (refused.returncode, refused.stdout) == (86, "")
    assert "refused: driver 470.57.02 is older than 525.60.13" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not marker.exists()

    for mode in ("off", "done", "warn"):
        passed = enter(root, "echo", "here", ENVFORGE_RECORDED=str(old), ENVFORGE_PREFLIGHT=mode)
        assert (passed.returncode, passed.stdout) == (0, "here\n")
        assert bool(passed.stderr) is (mode == "warn")
    passed = enter(root, "sh", "-c", "echo out; exit 42", ENVFORGE_RECORDED=str(good))
    assert (passed.returncode, passed.stdout, passed.stderr) == (42, "out\n", "")

    told = enter(root, "preflight", "--json", ENVFORGE_RECORDED=str(old))
    assert told.returncode == 86
    assert json.loads(told.stdout)["cause"]["id"] == "driver-too-old"


def test_the_proof_is_not_stopped_at_the_door(tmp_path: Path) -> None:
    # It looks closer itself, and a static one is for machines without a GPU.
    root = make_environment(tmp_path / "image", GPU)
    told = enter(root, "verify", "--help", ENVFORGE_RECORDED=str(record_node(tmp_path / "old", driver="470.57.02")))
    assert told.returncode == 0
    assert "--grade" in told.stdout


def test_an_image_for_cpus_lets_everything_through_and_signals_too(tmp_path: Path) -> None:
    root = make_environment(tmp_path / "image", CPU)
    assert enter(root, "echo", "x").stdout == "x\n"
    killed = enter(root, "sh", "-c", "kill -TERM $$")
    assert killed.returncode == -signal.SIGTERM  # the command stands in the entrypoint's place
    assert enter(root, "python", "-c", "import sys; print(sys.prefix)").stdout.strip() == str(root / "env")
    assert sys.prefix != str(root / "env")
