"""`envforge verify`: which interpreter, which files, which exit code. A shell script stands in for the interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 3), (signal.SIGTERM, 143)])
def test_a_signal_for_us_alone_ends_the_proof_too(fake_env: Path, number: signal.Signals, code: int) -> None:
    """A scheduler or `kill` reaches one process, where Ctrl-C reaches all."""
    (fake_env / "bin" / "python").write_text(
        f"#!/bin/sh\necho $$ > {fake_env}/new; mv {fake_env}/new {fake_env}/pid\nexec sleep 60\n"
    )
    words = ["verify", "--env", str(fake_env), "--grade", "static"]
    script = f"import envforge.cli.verify as v; v.GRACE = 0.1\nfrom envforge.cli import main; main({words!r})"
    ours = subprocess.Popen([sys.executable, "-c", script])
    while not (fake_env / "pid").exists():
        assert ours.poll() is None
    ours.send_signal(number)
    assert ours.wait(30) == code
    with pytest.raises(ProcessLookupError):
        os.kill(int((fake_env / "pid").read_text()), 0)


def test_options_reach_the_proof(fake_env: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--env", str(fake_env), "--model", str(tmp_path), "--stack", "unsloth", "--steps", "3", "--processes", "2"]
    assert run([*argv, "--limit", "chat=9", "--limit", "data=8", "--keep-going", "--max-length", "64"]) == 0
    given = " ".join(line[4:] for line in capfd.readouterr().out.splitlines() if line.startswith("arg "))
    for part in ("--stack unsloth", "--steps 3", "--limit chat=9", "--limit data=8", "--keep-going", "--processes 2"):
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


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A receipt of a real run: this interpreter's own environment against a plan that it does not meet."""
    folder = tmp_path_factory.mktemp("failed")
    plan = {"variant": "cpu", "pins": {"no-such-package-here": "1"}, "target": {}, "cuda": None}
    (folder / "plan.json").write_text(json.dumps(plan))
    argv = ["--grade", "static", "--plan", str(folder / "plan.json"), "--layers", "environment"]
    argv += ["--json", str(folder / "receipt.json"), "--report", str(folder / "page.html")]
    argv += ["--logs", str(folder / "logs")]
    assert run(argv) == 1
    return folder / "receipt.json"


def test_the_real_proof_through_the_command(failed: Path) -> None:
    receipt = json.loads(failed.read_text())
    assert sys.prefix not in failed.read_text() and "<prefix>" in receipt["layers"][0]["checks"][0]["text"]
    assert receipt["first_failure"]["check"] == "environment.pins"
    assert isinstance(receipt["findings"], list)
    page = (failed.parent / "page.html").read_text()
    assert "environment.pins" in page and "no-such-package-here==1 is not installed" in page
    assert sorted(path.name for path in failed.parent.iterdir()) == ["logs", "page.html", "plan.json", "receipt.json"]
    assert {"environment.log", "environment.events"} <= {path.name for path in (failed.parent / "logs").iterdir()}


def test_the_person_here_sees_which_python_runs(capfd: pytest.CaptureFixture[str]) -> None:
    run(["--grade", "static", "--layers", "environment"])
    assert f"in {sys.prefix}" in capfd.readouterr().out


def with_failure(failed: Path, place: Path, check: dict[str, object], **run: object) -> Path:
    """The receipt with another failure in a training layer, not explained yet."""
    receipt = json.loads(failed.read_text())
    check = {"layer": "training", "status": "fail", "figures": {}, "seconds": 1.0, "error": "", "text": "", **check}
    layer = {"layer": "training", "status": "fail", "seconds": 1.0, "checks": [check], "runs": [run]}
    receipt.update(layers=[layer], findings=None)
    place.write_text(json.dumps(receipt))
    return place


def test_the_log_of_a_failure_is_diagnosed_into_the_receipt(
    failed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = "../aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: block: [1,0,0], thread: [1,0,0] "
    log += "Assertion `srcIndex < srcSelectDimSize` failed.\nRuntimeError: CUDA error: device-side assert triggered\n"
    check = {"id": "training.steps", "text": "RuntimeError: CUDA error: device-side assert triggered", "error": "x"}
    old = with_failure(failed, tmp_path / "old.json", check, log_tail=log)
    assert run(["--receipt", str(old), "--json", str(tmp_path / "new.json")]) == 1
    findings = json.loads((tmp_path / "new.json").read_text())["findings"]
    assert findings[0]["id"] == "device-assert-embedding-index" and findings[0]["fixes"]
    out = capfd.readouterr().out
    assert "device-assert-embedding-index: " in out and f"- {findings[0]['fixes'][0]}" in out


@pytest.mark.parametrize(
    ("identity", "text", "finding"),
    [
        ("training.steps", "step 3, micro-batch 1: the loss is nan; ...", "nan-loss"),
        (
            "training.steps",
            "the loss is finite (2.1) but the gradient norm is nan: float16 overflow",
            "nan-grad-fp16",
        ),
        ("training.adapters-move", "lora_B changed by 0", "lora-not-training"),
        ("environment.torch-build", "the plan wants torch 2.10.0+cu130, installed is 2.10.0+cpu", "wrong-local-build"),
        ("environment.compiler", "Python.h not found", "triton-no-python-headers"),
        ("environment.compiler", "a C compiler and Python.h not found", "triton-no-compiler"),
        ("environment.caches", "not writable by uid 12345: HF_HOME", "cache-not-writable"),
    ],
)
def test_what_a_check_measured_itself_is_certain(
    identity: str, text: str, finding: str, failed: Path, tmp_path: Path
) -> None:
    old = with_failure(failed, tmp_path / "old.json", {"id": identity, "text": text})
    assert run(["--receipt", str(old), "--json", str(tmp_path / "new.json")]) == 1
    first = json.loads((tmp_path / "new.json").read_text())["findings"][0]
    assert (first["id"], first["confidence"], first["cause"]) == (finding, "certain", text)


def test_every_observed_kind_is_a_known_finding() -> None:
    from envforge.cli.findings import OBSERVED
    from envforge.diagnose.rules import load_rules

    assert set(OBSERVED.values()) <= {rule.id for rule in load_rules().rules}


def test_two_receipts_side_by_side(failed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    receipt = json.loads(failed.read_text())
    step = {"id": "training.steps", "layer": "training", "status": "pass", "text": "", "error": "", "seconds": 1.0}
    for name, speed, torch in (("a", 100.0, "2.12.0"), ("b", 50.0, "2.13.0")):
        receipt["layers"] = [{"checks": [{**step, "figures": {"tokens_per_second": speed, "steps": 8}}]}]
        receipt["versions"] = {"torch": torch, "peft": "0.21.2"}
        (tmp_path / f"{name}.json").write_text(json.dumps(receipt))
    assert run(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json", "-"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["versions"] == {"torch": ["2.12.0", "2.13.0"]}
    assert [(row["figure"], row["values"], row["verdict"]) for row in found["figures"]] == [
        ("tokens_per_second", [100.0, 50.0], "worse")
    ]
    assert found["worse"] == ["training.steps tokens_per_second"]
    assert run(["--compare", str(tmp_path / "b.json"), str(tmp_path / "a.json")]) == 0
    out = capfd.readouterr().out
    assert "2.13.0 -> 2.12.0" in out and "better" in out
    assert run(["--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert "no difference" in capfd.readouterr().out


@pytest.mark.parametrize(
    "argv", [["--compare", "a", "b"], ["--receipt", "missing.json"], ["--report", "page.pdf", "--grade", "static"]]
)
def test_what_is_no_receipt_and_no_page_is_a_usage_error(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("{}")
    assert run(argv) == 2


def test_a_place_where_no_receipt_can_be_written_is_told_before_the_work(
    fake_env: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from envforge.verify import app

    (tmp_path / "file").write_text("mine")
    for option, place in (
        ("--json", tmp_path / "file" / "r.json"),
        ("--json", tmp_path),
        ("--report", "/proc/x/r.html"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["verify", str(fake_env), option, str(place)])
        assert stop.value.code == 2
        assert app.main([option, str(place), "--grade", "static"]) == 2
        assert capfd.readouterr().err.count(str(place)) >= 2
