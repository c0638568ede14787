"""The command: files, standard input, host facts, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OOM = "torch 2.11.0+cu130\nRuntimeError: CUDA driver version is insufficient for CUDA runtime version\n"


def envforge(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    program = "from envforge.cli import main; import sys; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", program, "diagnose", *args], input=stdin, capture_output=True, text=True
    )


def test_json_from_standard_input() -> None:
    done = envforge("-", "--json", "--driver", "550.54.15", stdin=OOM)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["findings"][0]["id"] == "driver-too-old"
    assert answer["findings"][0]["confidence"] == "certain"


def test_text_names_cause_evidence_and_fix(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(OOM)
    done = envforge(str(log))
    assert done.returncode == 0
    assert "driver-too-old" in done.stdout and "line 2:" in done.stdout and "what to do" in done.stdout
    assert "\x1b" not in done.stdout


def test_nothing_known_says_so_and_what_to_run_next() -> None:
    done = envforge("-", stdin="all is well\n")
    assert done.returncode == 0
    assert "not known" in done.stdout and "what to run next" in done.stdout
    answer = json.loads(envforge("-", "--json", stdin="").stdout)
    assert answer["findings"] == [] and answer["next"]


def test_check() -> None:
    assert envforge("-", "--check", stdin=OOM).returncode == 1
    assert envforge("-", "--check", stdin="all is well\n").returncode == 0


def test_host_file(tmp_path: Path) -> None:
    host = tmp_path / "host.json"
    host.write_text(json.dumps({"schema": 1, "driver": None, "gpus": [], "arch": "x86_64"}))
    answer = json.loads(envforge("-", "--json", "--host", str(host), stdin=OOM).stdout)
    assert answer["findings"][0]["id"] == "driver-missing"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere.log"], "no such file"),
        (["-", "--driver", "new"], "driver version"),
        (["-", "--host", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_usage_is_two(args: list[str], said: str) -> None:
    done = envforge(*args, stdin="")
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


def test_driver_none() -> None:
    log = 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].\n'
    answer = json.loads(envforge("-", "--json", "--driver", "none", stdin=log).stdout)
    assert answer["findings"][0]["id"] in ("driver-missing", "no-nvidia-gpu-on-host")
    assert "container-toolkit-missing" not in [finding["id"] for finding in answer["findings"]][:1]
