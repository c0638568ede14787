"""`envforge verify`: which interpreter, which files, which exit code. A shell script stands in for the interpreter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from envforge.cli import verify
from envforge.cli.app import main
from envforge.errors import UsageError


@pytest.fixture
def fake_env(tmp_path: Path) -> Path:
    """An environment whose interpreter prints its arguments and what PYTHONPATH holds, and ends with $CODE."""
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    python = prefix / "bin" / "python"
    python.write_text('#!/bin/sh\nfor a in "$@"; do echo "arg $a"; done\nls $PYTHONPATH/envforge\nexit ${CODE:-0}\n')
    python.chmod(0o755)
    return prefix


def run(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *argv])
    return int(stop.value.code or 0)


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_proofs_exit_code_is_ours(
    code: int, fake_env: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE", str(code))
    assert run(["--env", str(fake_env), "--grade", "static"]) == code
    out = capfd.readouterr().out.splitlines()
    assert out[:4] == ["arg -m", "arg envforge.verify", "arg --grade", "arg static"]
    # Only the proof's own code is put on the path: nothing else of envforge may reach into the environment.
    assert sorted(line for line in out if not line.startswith("arg")) == ["__init__.py", "verify"]


def test_options_reach_the_proof(fake_env: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--env", str(fake_env), "--model", str(tmp_path), "--stack", "unsloth", "--steps", "3", "--json", "-"]
    assert run([*argv, "--limit", "chat=9", "--limit", "data=8", "--keep-going", "--max-length", "64"]) == 0
    given = " ".join(line[4:] for line in capfd.readouterr().out.splitlines() if line.startswith("arg "))
    for part in ("--stack unsloth", "--steps 3", "--limit chat=9", "--limit data=8", "--keep-going", "--json -"):
        assert part in given
    assert f"--model {tmp_path}" in given and "--max-length 64" in given


def test_a_built_folder_brings_its_files(fake_env: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    built = tmp_path / "built"
    built.mkdir()
    fake_env.rename(built / "env")
    for name in ("plan.json", "requirements.txt", "verify.json"):
        (built / name).write_text("{}")
    mine = tmp_path / "mine.json"
    assert run([str(built), "--grade", "static", "--plan", str(mine)]) == 0
    given = " ".join(line[4:] for line in capfd.readouterr().out.splitlines() if line.startswith("arg "))
    assert f"--plan {mine}" in given and str(built / "plan.json") not in given
    assert f"--lock {built / 'requirements.txt'}" in given and f"--settings {built / 'verify.json'}" in given


def test_bad_environments_are_usage_errors(fake_env: Path, tmp_path: Path) -> None:
    assert run(["--env", str(tmp_path / "none")]) == 2
    assert run(["--env", str(fake_env), "--python", sys.executable]) == 2
    assert run([str(tmp_path)]) == 2
    assert verify.choose_python(None, None, None) == Path(sys.executable)


def test_model_names(tmp_path: Path) -> None:
    python = Path(sys.executable)
    assert verify.model_arguments(str(tmp_path), python) == ["--model", str(tmp_path)]
    assert verify.model_arguments("hf:owner/name@abc", python) == ["--model", "owner/name", "--revision", "abc"]
    assert verify.model_arguments("owner/name", python) == ["--model", "owner/name"]
    with pytest.raises(UsageError, match="Hugging Face"):
        verify.model_arguments("ms:owner/name", python)


def test_the_real_proof_through_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """This interpreter's own environment against a plan that it does not meet; the receipt on stdout."""
    plan = {"variant": "cpu", "pins": {"no-such-package-here": "1"}, "target": {}, "cuda": None}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    argv = ["--grade", "static", "--plan", str(tmp_path / "plan.json"), "--layers", "environment", "--json", "-"]
    assert run(argv) == 1
    receipt = json.loads(capfd.readouterr().out)
    assert receipt["first_failure"]["check"] == "environment.pins"
