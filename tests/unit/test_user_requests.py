"""Requests, files and targets as people bring them to the command line, and what they must be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lock_index import StandIn, quiet
from test_resolve import conflict
from test_resolve_cli import A100, answer, envforge, machine

__all__ = ["machine"]  # the fixture that keeps this machine's settings and every index out


def lines(text: str) -> list[str]:
    """What pip would read of an answer."""
    return [line for line in text.splitlines() if line and not line.startswith(("#", "--"))]


def test_limits_of_rules_are_no_requirements(capsys: pytest.CaptureFixture[str]) -> None:
    """`pip install -r` of an answer must not bring a default torch, a pandas or a torchao that nobody asked for."""
    code, out, _ = envforge(capsys, "resolve", "transformers", "peft<0.15", *A100)
    assert code == 0 and "torchao" in out and "(a rule)" in out
    assert all("==" in line for line in lines(out)), out


@pytest.mark.parametrize("day", ["20250320", "2025-W12-4", "2025-3-20"])
def test_a_date_has_one_form(capsys: pytest.CaptureFixture[str], day: str) -> None:
    code, _, err = envforge(capsys, "resolve", "torch", *A100, "--as-of", day)
    assert code == 2 and day in err and "2025-03-20" in err


def test_what_an_earlier_answer_pins_is_not_called_old(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is kept on purpose: that the hosts allow nothing newer would not even be true."""
    (tmp_path / "pins.txt").write_text("torch==2.6.0+cu124\ntransformers==4.49.0\npeft==0.14.0\n")
    data = answer(capsys, "transformers", "peft", "trl", "--from", tmp_path / "pins.txt", *A100)
    assert data["pins"]["peft"] == "0.14.0" and data["pins"]["transformers"] == "4.49.0"
    told = {w["id"]: w["text"] for w in data["warnings"]}
    assert "old-for-host" not in told and "--upgrade" in told["stale"] and "trl" in told["stale"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("uv.lock", 'version = 1\nrequires-python = ">=3.11"\n[[package]]\nname = "torch"\nversion = "2.6.0+cu124"\n'),
        ("poetry.lock", '[[package]]\nname = "torch"\nversion = "2.6.0+cu124"\n[metadata]\nlock-version = "2.1"\n'),
    ],
)
def test_locks_of_other_tools_are_starting_points(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    data = answer(capsys, "torch", *A100, "--from", tmp_path / name)
    assert (data["pins"]["torch"], data["variant"]) == ("2.6.0", "cu124")


def warned(data: dict[str, Any]) -> dict[str, str]:
    return {w["id"]: w["text"] for w in data["warnings"]}


def test_an_extra_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = warned(answer(capsys, "peft[nosuch]", "transformers[torch]", *A100))
    assert "nosuch" in told["unknown-extra"] and "peft" in told["unknown-extra"] and "[torch]" not in str(told)


def test_an_address_is_planned_as_a_release_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is known of a wheel or a commit yet: no word on compiling it, no evidence for it."""
    wheel = "file:///tmp/flash_attn-2.7.4-cp312-cp312-linux_x86_64.whl"
    data = answer(capsys, f"flash-attn @ {wheel}", "torch==2.5.1", *A100)
    told = warned(data)
    assert "source-build" not in told and f"release {data['pins']['flash-attn']}" in told["address"]
    data = answer(capsys, "peft @ git+https://example.org/peft@main", *A100)
    assert "full commit" in warned(data)["address"]
    assert not any("peft" in cell["cell"] for cell in data["evidence"])


def test_a_stack_without_torch_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "transformers", *A100)
    assert "torch" not in data["pins"] and "ask for torch" in warned(data)["no-torch"]
    assert "no-torch" not in warned(answer(capsys, "transformers", "torch", *A100))


def test_a_marker_that_does_not_hold_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "torch", "pywin32; sys_platform == 'win32'", *A100)
    assert [w["id"] for w in data["warnings"] if "pywin32" in w["text"]] == ["marker-not-met"]
    assert "Linux" in warned(data)["marker-not-met"]


def test_a_lock_hides_no_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock takes standard output for itself. Stands in: an index on loopback."""
    quiet(monkeypatch, tmp_path)
    with StandIn() as index:
        index.add("simple", "six", "1.16.0")
        mirrors = ("--mirror", f"index={index.url}/simple", "--mirror", f"torch={index.url}/whl")
        code, out, err = envforge(capsys, "resolve", "six", "--driver", "none", "--lock", *mirrors)
    assert code == 0 and "six==1.16.0" in out and "warning (outside-matrix)" in err and "warning" not in out


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("peft==0.12.9", "peft==0.12.0"),
        ("torchvision==0.19.9", "torchvision==0.19.1"),
        ("transformers==5.99.0", "transformers==5.24.0"),
    ],
)
def test_a_release_that_is_not_there_is_answered_with_the_nearest(line: str, fix: str) -> None:
    assert fix in [f.change for f in conflict([line], "550.54.15", ("NVIDIA A100-SXM4-80GB",)).fixes]


def test_fixes_of_a_closure_that_failed_are_not_promised(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages outside the matrix speak only when locked. Stands in: an index on loopback."""
    quiet(monkeypatch, tmp_path)
    with StandIn() as index:
        index.add("simple", "odd", "1.0", "rich<13")
        for version in ("14.2.0", "12.6.0"):
            index.add("simple", "rich", version)
        mirrors = ("--mirror", f"index={index.url}/simple", "--mirror", f"torch={index.url}/whl")
        words = ("resolve", "odd", "rich==14.2.0", "--driver", "none", "--python", "3.12", "--lock", *mirrors)
        code, _, err = envforge(capsys, *words)
    assert code == 1 and "rich 14.2.0 cannot be installed" in err, err
    assert "may do" in err and "not been tried" in err


# --- what is there already ---------------------------------------------------------------------------------------


def check(capsys: pytest.CaptureFixture[str], text: str, tmp_path: Path, *target: str) -> tuple[int, str]:
    (tmp_path / "pins.txt").write_text(text)
    code, out, err = envforge(capsys, "check", "-r", tmp_path / "pins.txt", *(target or A100))
    assert not err, err
    return code, out


def test_a_torch_without_a_label_is_the_build_of_the_default_index(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """torch==2.6.0 from the default index is built for CUDA 12.4; that a cu118 build exists helps no old driver."""
    old = ("--driver", "470.57.02", "--gpu", "NVIDIA A100-SXM4-80GB")
    code, out = check(capsys, "torch==2.6.0\n", tmp_path, *old)
    assert code == 1 and "need driver >=525.60.13" in out and "taken for cu124" in out
    assert check(capsys, "torch==2.6.0\n", tmp_path, *old, "--variant", "cu118")[0] == 0
    lines = "--extra-index-url https://download.pytorch.org/whl/cu118\ntorch==2.6.0\n"
    code, out = check(capsys, lines, tmp_path, *old)
    assert code == 0 and "taken for" not in out
    code, out = check(capsys, "torch==2.6.0+cu124\n", tmp_path, "--driver", "none")
    assert code == 0 and "CUDA build" in out


def test_an_environment_tells_the_build_of_its_torch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.11/site-packages"
    (site / "torch-2.6.0.dist-info").mkdir(parents=True)
    (site / "torch-2.6.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n")
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text("__version__ = '2.6.0+cu118'\ncuda: Optional[str] = '11.8'\n")
    words = ("check", "--env", tmp_path, "--driver", "470.57.02", "--gpu", "NVIDIA A100-SXM4-80GB")
    assert envforge(capsys, *words)[0] == 0
    (site / "torch/version.py").write_text("__version__ = '2.6.0+cpu'\ncuda: Optional[str] = None\n")
    assert "GPUs there stay unused" in envforge(capsys, *words)[1]


def test_a_torch_that_nobody_knows_is_no_yes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out = check(capsys, "torch==9.9.0+cu126\ntransformers==4.49.99\nrequests==2.0\n", tmp_path)
    assert code == 1 and "torch 9.9.0 is not known" in out and "transformers==4.49.99" in out and "requests" not in out


def test_a_frozen_environment_has_addresses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = "certifi @ file:///croot/certifi_1707/work/certifi\ntorch==2.5.1+cu124\n"
    text += "peft @ file:///wheels/peft-0.14.0-py3-none-any.whl\ntrl @ git+https://example.org/trl@abc\n"
    code, out = check(capsys, text, tmp_path)
    assert code == 0 and "peft 0.14.0 needs" in out and "not judged" in out and "trl" in out and "certifi" not in out


def test_what_is_missing_everywhere_is_said_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("- {name: a, driver: 550.54.15, gpus: [A100]}\n- {name: b, driver: 580.65.06, gpus: [H100]}\n")
    code, out = check(capsys, "torch==2.6.0+cu124\n", tmp_path, "--fleet", str(fleet))
    assert code == 0 and out.count("torch 2.6.0 needs fsspec") == 1


def test_why_says_no_yes_to_what_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = envforge(capsys, "matrix", "why", "torch==9.9")
    assert code == 0 and out.startswith("not known:") and "torch==9.9" in out
