"""The matrix commands as a user meets them: answers, exit codes, places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from envforge import settings
from envforge.cli import matrix
from envforge.errors import UsageError
from envforge.matrix.load import DATA


@pytest.fixture(autouse=True)
def _no_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SITE", tmp_path / "site")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> tuple[int, str]:
    app = Typer()
    matrix.register(app)
    result = CliRunner().invoke(app, ["matrix", *words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_why_no_names_the_row_and_its_source() -> None:
    code, out = run("why", "torch==2.1.2", "numpy==2.0.0")
    assert code == 1
    assert out.startswith("no:\n  torch before 2.3 was built for numpy 1")
    assert "source: pytorch issues #107302" in out


def test_why_yes_lists_what_decides() -> None:
    code, out = run(
        "why", "torch==2.6.0", "peft==0.15.2", "accelerate==1.6.0", "--driver", "560.35.05", "--gpu", "sm_80", "--json"
    )
    assert code == 0
    data = json.loads(out)
    decides = {row["text"]: row["source"] for row in data["decides"]}
    assert data["ok"] and not data["broken"]
    assert any(text.startswith("peft 0.15.2 needs accelerate") for text in decides)
    assert any(text.startswith("CUDA 12 builds (cu124, cu126) need driver >=525.60.13") for text in decides)
    assert any("torch 2.6.0 has code for sm_80 in its build for" in text for text in decides)
    assert all(decides.values()), "every row has its source"
    code, out = run("why", "torch==2.6.0", "numpy==2.1.0")
    assert code == 0 and out.startswith("yes:") and "torch 2.6.0 is built for" in out


def test_why_reads_each_row_once_and_refuses_what_is_no_question() -> None:
    for words in (["torch>=2"], ["torch==2.6.0", "torch==2.7.0"]):
        with pytest.raises(UsageError):
            run("why", *words)


def test_check_is_quiet_on_the_shipped_matrix() -> None:
    assert run("check", "--json") == (0, '{\n "schema": 1,\n "ok": true,\n "findings": []\n}\n')


def test_check_tells_file_line_row_fault_and_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "data")
    path = tmp_path / "data" / "policy.yaml"
    path.write_text(path.read_text().replace("2026-11-30", "2026-01-30"))
    code, out = run("check", "--folder", str(tmp_path / "data"), "--no-images")
    assert code == 1
    line = path.read_text().split("as_of")[0].count("\n") + 1
    assert f"{path}:{line}: policy" in out or f"{path}:{line}: field policy" in out, out
    assert "has a release of" in out
    assert out.endswith("1 finding\n")
    code, out = run("check", "--folder", str(tmp_path / "data"), "--no-images", "--json")
    [finding] = json.loads(out)["findings"]
    assert (finding["id"], finding["line"]) == ("policy", line)
    assert finding["do"]


def test_check_names_faults_of_the_diagnosis_rules_and_of_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from envforge.keep import images
    from envforge.matrix.load import load_matrix

    shutil.copytree(DATA, tmp_path / "data")
    path = tmp_path / "data" / "diagnoses.yaml"
    path.write_text(path.read_text().replace("retryable: false", "retryable: maybe", 1))
    code, out = run("check", "--folder", str(tmp_path / "data"), "--no-images")
    assert code == 1 and "matrix/data/diagnoses.yaml:" in out and "maybe" in out

    folder = tmp_path / "images" / "odd"
    folder.mkdir(parents=True)
    (folder / "image.yaml").write_text(
        "schema: 1\nname: odd\nrequests: [torch>=2.15]\nhosts:\n"
        '  - {name: fine, driver: "580.95.05", gpus: [sm_80]}\n  - {name: old, driver: "470.57.02", gpus: [sm_80]}\n'
    )
    [finding] = images.check_images(load_matrix(), images=tmp_path / "images")
    assert (finding.where, finding.line) == ("images/odd/image.yaml", 6)
    assert "does not resolve" in finding.what and "driver" in finding.what
    (folder / "image.yaml").write_text("schema: 1\nname: odd\nrequests: [torch]\n")
    assert [f.what for f in images.check_images(load_matrix(), images=tmp_path / "images")] == ["declares no hosts"]


def test_check_wants_a_folder() -> None:
    with pytest.raises(UsageError):
        run("check", "--folder", "/nowhere")
