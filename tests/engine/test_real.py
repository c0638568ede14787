"""The real thing, once: real packages, the real small model, a real engine, the command line from end to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envforge.image.engines.docker import DockerEngine

pytestmark = [pytest.mark.engine, pytest.mark.index, pytest.mark.model, pytest.mark.slow]

REQUEST = ("transformers", "peft", "accelerate", "datasets", "torch==2.13.0")


def envforge(*words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    argv = [sys.executable, "-c", "from envforge.cli import main; main()", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=dict(os.environ))


def test_a_real_stack_is_built_proven_and_found_again(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    words = ["build", *REQUEST, "--driver", "none", "--python", "3.11", "--engine", "docker", "--base", base_image]
    words += ["--steps", "4", "--json"]  # no --model: the small real one is made with what was just built
    done = envforge(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["grade"] == "full"
    assert result["pending"] is None
    proof = result["proof"]
    assert proof["passed"] is True
    assert proof["image"]["digest"] == result["digest"] == proof["image_digest"]
    assert proof["losses"][-1] < proof["losses"][0]
    assert "Paris" in proof["chat"]["base"]

    image = engine.client.images.get(result["reference"])
    assert image.id == result["digest"]
    assert image.attrs["Config"]["User"] == "1000:0"
    assert result["size"] < 1_100_000_000  # with all that wheels bring along it is 1.4 GB
    told = re.search(r"([\d,]+) MB when it is done", done.stderr)
    assert told is not None, done.stderr
    assert abs(int(told[1].replace(",", "")) * 1e6 / result["size"] - 1) < 0.1, "what is told before is what comes"

    # As anybody, without network: the environment layer of the proof again, inside.
    again = engine.run(result["reference"], ["verify", "--grade", "static"], user="12345:0")
    assert again.code == 0, again.output
    assert "PASSED" in again.output.upper()

    second = envforge(*words)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["reused"] is True
    assert json.loads(second.stdout)["receipt"] == result["receipt"]
