"""The data and chat layers: every check passes on a sound model and fails on a broken one.

The model is tiny (see conftest); each test breaks exactly one thing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from proof_parts import Run, copy_of, only_failure, states

from envforge.verify.layers import chat, data
from envforge.verify.policy import IGNORE, SafeCollator, TrainingPolicy
from envforge.verify.record import FAIL, PASS, SKIP, WARN, Fail, Recorder
from envforge.verify.settings import Settings
from envforge.verify.stacks.hf import HfStack
from envforge.verify.texts import SAMPLES

# data -----------------------------------------------------------------------------------------------------------------


def test_data_passes(settings: Settings, run_layer_here: Run) -> None:
    checks = run_layer_here(data.run, settings)
    assert set(states(checks).values()) == {PASS}, states(checks)
    assert checks["truncation"].figures["tokens"] >= 5000
    assert checks["truncation"].figures["after"] == 128
    assert checks["batch"].figures["shape"][1] % 8 == 0


def test_vocabulary_larger_than_the_embedding(settings: Settings, run_layer_here: Run, tmp_path: Path) -> None:
    """The story's wrong vocabulary: a tokenizer with ids that have no row."""
    from transformers import AutoTokenizer

    changed = copy_of(Path(settings.model), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(changed)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(changed)
    check = only_failure(run_layer_here(data.run, settings, model=str(changed)))
    assert check.id == "data.vocabulary" and "device-side assert" in check.text


def test_configuration_and_weights_of_different_models(settings: Settings, run_layer_here: Run, tmp_path: Path) -> None:
    changed = copy_of(Path(settings.model), tmp_path, vocab_size=5000)
    check = only_failure(run_layer_here(data.run, settings, model=str(changed)))
    assert check.id == "data.vocabulary" and "do not belong together" in check.text


def test_cap_above_the_positions(settings: Settings, run_layer_here: Run, tmp_path: Path) -> None:
    changed = copy_of(Path(settings.model), tmp_path, max_position_embeddings=64)
    checks = run_layer_here(data.run, settings, model=str(changed))
    assert checks["cap"].status == FAIL and "64 positions" in checks["cap"].text


def test_cap_above_2048_is_a_warning(settings: Settings, run_layer_here: Run, tmp_path: Path) -> None:
    changed = copy_of(Path(settings.model), tmp_path, max_position_embeddings=8192)
    assert run_layer_here(data.run, settings, model=str(changed), max_length=4096)["cap"].status == WARN


def test_a_collator_that_does_not_cut(settings: Settings) -> None:
    stack = HfStack(settings)

    class Lazy(SafeCollator):
        def encode(self, sample: Any) -> list[int]:
            return list(self.tokenizer(sample)["input_ids"])

    recorder = Recorder("data")
    tokenizer = stack.tokenizer()
    data.truncation(recorder, tokenizer, Lazy(tokenizer, stack.policy()), settings.max_length)
    assert recorder.checks[0].status == FAIL and "the cap is 128" in recorder.checks[0].text


def batch_of(settings: Settings) -> dict[str, Any]:
    stack = HfStack(settings)
    return SafeCollator(stack.tokenizer(), stack.policy())([SAMPLES[0], "Yes."])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("labels on padding", "labels on padding"),
        ("float ids", "needs int64"),
        ("int32 ids", "needs int64"),
        ("id beyond the rows", "embedding has rows"),
        ("negative id", "embedding has rows"),
        ("odd width", "not a multiple of 8"),
        ("labels of other ids", "not the (cut) ids"),
        ("ragged labels", "has shape"),
    ],
)
def test_each_rule_for_a_batch(settings: Settings, name: str, words: str) -> None:
    import torch

    made = batch_of(settings)
    data.inspect_batch(made, 400, 2048, 8)
    if name == "labels on padding":
        made["labels"][made["attention_mask"] == 0] = 1
    elif name == "float ids":
        made["input_ids"] = made["input_ids"].float()
    elif name == "int32 ids":
        made["input_ids"] = made["input_ids"].to(torch.int32)
    elif name == "id beyond the rows":
        made["input_ids"][0, 0] = 400
    elif name == "negative id":
        made["input_ids"][0, 0] = -1
    elif name == "odd width":
        made = {key: value[:, :-1] for key, value in made.items()}
    elif name == "labels of other ids":
        made["labels"][0, 0] = 3
    else:
        made["labels"] = made["labels"][:, :-1]
    with pytest.raises(Fail) as raised:
        data.inspect_batch(made, 400, 2048, 8)
    assert words in str(raised.value)


def test_batch_beyond_the_positions(settings: Settings) -> None:
    with pytest.raises(Fail, match="positions run to"):
        data.inspect_batch(batch_of(settings), 400, 8, 8)


def test_padding_with_the_end_token_keeps_the_real_one(settings: Settings) -> None:
    """The padding token is the end token here: only padding is masked, not the end of a text."""
    made = SafeCollator(HfStack(settings).tokenizer(), TrainingPolicy(max_length=16))(
        [{"input_ids": [5, 6, 1]}, {"input_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13]}]
    )
    assert made["labels"][0].tolist() == [5, 6, 1] + [IGNORE] * 13


def test_own_data_is_measured(settings: Settings, run_layer_here: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    rows: list[Any] = [{"text": SAMPLES[0]}] * 20 + [{"text": " ".join(SAMPLES)}, {"text": "Hm"}]
    rows += [{"messages": [{"role": "user", "content": SAMPLES[1]}]}, {"question": SAMPLES[2], "answer": "Yes."}]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    check = run_layer_here(data.run, settings, data=str(file))["own-data"]
    assert check.status == WARN and check.figures["count"] == 24
    assert check.figures["over_cap"] == 1 and check.figures["short"] == 1
    assert "suggested max_length" in check.text


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [('{"text": "a"}\nnot json\n', FAIL, "line 2"), ("[1, 2]\n", FAIL, "line 1"), ("\n\n", FAIL, "no sample")],
)
def test_own_data_that_cannot_be_read(
    text: str, status: str, words: str, settings: Settings, run_layer_here: Run, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(text)
    check = run_layer_here(data.run, settings, data=str(file))["own-data"]
    assert check.status == status and words in check.text


def test_plain_text_is_read_by_paragraphs(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("one\ntwo\n\n\nthree\n")
    assert list(data.read_texts(file, None)) == ["one\ntwo\n", "three\n"]


# chat -----------------------------------------------------------------------------------------------------------------


def test_chat_passes(settings: Settings, run_layer_here: Run) -> None:
    checks = run_layer_here(chat.run, settings)
    assert states(checks).pop("four-bit") == SKIP
    expected = dict.fromkeys(("load", "devices", "logits", "answer", "deterministic"), PASS)
    assert {name: state for name, state in states(checks).items() if name != "four-bit"} == expected


def test_an_implausible_answer_fails(settings: Settings, run_layer_here: Run) -> None:
    check = only_failure(run_layer_here(chat.run, settings, expect="Paris"))
    assert check.id == "chat.answer" and "Paris" in check.text


def test_weights_that_are_not_numbers(settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = HfStack.model

    def damaged(self: HfStack, folder: str | None = None, dtype: Any = None) -> Any:
        model = original(self, folder, dtype)
        model.get_input_embeddings().weight.data[7] = float("nan")
        model.lm_head.weight.data[7] = float("nan")
        return model

    monkeypatch.setattr(HfStack, "model", damaged)
    assert run_layer_here(chat.run, settings)["logits"].status == FAIL


def test_a_tensor_on_another_device(settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    recorder = Recorder("chat")
    model = HfStack(settings).model()
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.empty(128, 64, device="meta"))
    chat.one_device(recorder, model, "cpu")
    assert recorder.checks[0].status == FAIL and "layers.1.mlp.up_proj.weight (meta)" in recorder.checks[0].text


def test_a_model_without_generate_names_the_remote_code(settings: Settings) -> None:
    from envforge.verify.layers.talk import ask

    class Bare:
        pass

    with pytest.raises(Fail, match=r"transformers below 4\.50"):
        ask(Bare(), None, "x", 1, "cpu")


def test_four_bits_that_are_none(settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfStack, "four_bit_model", lambda self: self.model())
    check = run_layer_here(chat.run, settings, four_bit=True)["four-bit"]
    assert check.status == FAIL and "no layer of the model is a 4-bit layer" in check.text


def test_four_bits(settings: Settings, run_layer_here: Run) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    check = run_layer_here(chat.run, settings, four_bit=True)["four-bit"]
    assert check.figures["layers"] == ["Linear4bit"]  # so small a model may lose its words by that


def test_an_answer_beyond_the_positions(settings: Settings, run_layer_here: Run, tmp_path: Path) -> None:
    changed = copy_of(Path(settings.model), tmp_path, max_position_embeddings=16)
    check = run_layer_here(chat.run, settings, model=str(changed))["answer"]
    assert check.status == FAIL and "16 positions" in check.text
