"""Every check of the data, chat, training and effect layers passes on a sound model and fails on a broken one.

The model is tiny and random (see conftest); each test breaks exactly one thing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envforge.verify import share
from envforge.verify.layers import adapters, attention, chat, data, distributed, effect, steps, training
from envforge.verify.policy import IGNORE, MemoryWatch, SafeCollator, TrainingPolicy
from envforge.verify.record import FAIL, PASS, SKIP, WARN, Check, Fail, Recorder
from envforge.verify.settings import Settings
from envforge.verify.stacks.hf import HfStack
from envforge.verify.texts import SAMPLES

Run = Callable[..., dict[str, Check]]


def copy_of(folder: Path, place: Path, **config: Any) -> Path:
    """A copy of a model folder with other values in its config.json."""
    made = place / "changed"
    shutil.copytree(folder, made)
    path = made / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return made


def states(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.status for name, check in checks.items()}


def only_failure(checks: dict[str, Check]) -> Check:
    failed = [check for check in checks.values() if check.status == FAIL]
    assert len(failed) == 1, states(checks)
    return failed[0]


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


# training -------------------------------------------------------------------------------------------------------------


def test_training_then_effect_pass(settings: Settings, run_layer_here: Run) -> None:
    checks = run_layer_here(training.run, settings)
    assert FAIL not in states(checks).values(), {n: c.text for n, c in checks.items() if c.status == FAIL}
    losses = checks["steps"].figures["losses"]
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert checks["adapters-move"].figures["lora_b"] > checks["adapters-move"].figures["floor_b"]
    assert checks["longest-batch"].status == PASS  # a cap of 128 is small enough for the CPU
    assert checks["resume"].status == PASS and checks["resume"].figures["steps"] == 2
    after = run_layer_here(effect.run, settings)
    assert set(states(after).values()) == {PASS}, states(after)
    assert after["merge"].figures["adapter_effect"] > 0
    assert after["reload"].figures["difference"] < 1e-3
    assert after["limits"].figures["merged"]["dtype"] == "BF16"


def broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """`change` is done to every model that is made ready for training."""
    original = HfStack.training_model

    def changed(self: HfStack, policy: TrainingPolicy) -> Any:
        model = original(self, policy)
        change(model)
        return model

    monkeypatch.setattr(HfStack, "training_model", changed)


def test_everything_frozen(settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda model: [p.requires_grad_(False) for p in model.parameters()])
    check = run_layer_here(training.run, settings)["trainable"]
    assert check.status == FAIL and "no parameter is trainable" in check.text


def test_frozen_adapters_with_something_else_trainable(
    settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("norm.weight"))

    broken(monkeypatch, change)
    check = run_layer_here(training.run, settings)["trainable"]
    assert check.status == FAIL and "no LoRA pairs" in check.text


def test_adapters_that_get_no_gradient(
    settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.register_hook(lambda gradient: gradient * 0)

    broken(monkeypatch, change)
    checks = run_layer_here(training.run, settings)
    assert checks["gradients"].status == FAIL and "every gradient is zero" in checks["gradients"].text
    assert checks["adapters-move"].status == FAIL and "lora_B" in checks["adapters-move"].text
    assert checks["loss-falls"].status == FAIL


def test_adapters_of_which_only_a_is_stuck(
    settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.register_hook(lambda gradient: gradient * 0)

    broken(monkeypatch, change)
    checks = run_layer_here(training.run, settings)
    assert checks["adapters-move"].status == FAIL and "lora_A" in checks["adapters-move"].text


def test_nan_in_the_weights_names_the_first(
    settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: Any) -> None:
        model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight.data[0, 0] = float("nan")

    broken(monkeypatch, change)
    check = run_layer_here(training.run, settings)["steps"]
    assert check.status == FAIL
    assert "step 1, micro-batch 1" in check.text and "layers.1.mlp.up_proj" in check.text


def take(settings: Settings, batches: Callable[[list[dict[str, Any]]], None], policy: TrainingPolicy) -> steps.Log:
    stack = HfStack(settings)
    model = stack.training_model(policy)
    made = steps.make_batches(SafeCollator(stack.tokenizer(), policy), policy, "cpu")
    batches(made)
    log = steps.Log()
    steps.take_steps(model, made, policy, stack.precision(), "cpu", 3, MemoryWatch("cpu"), log)
    return log


def test_a_batch_without_anything_to_predict(settings: Settings) -> None:
    def change(made: list[dict[str, Any]]) -> None:
        made[1]["labels"][:] = IGNORE

    log = take(settings, change, HfStack(settings).policy())
    assert "step 1, micro-batch 2" in log.bad and "all labels are -100" in log.bad


def test_a_rate_that_blows_up_gives_advice(settings: Settings) -> None:
    policy = TrainingPolicy(max_length=64, accumulation=1, learning_rate=0.99, lora_alpha=10**20, max_grad_norm=1e30)
    log = take(settings, lambda made: None, policy)
    assert "nan" in log.bad or "inf" in log.bad, log
    assert "not finite" in log.bad or "max_grad_norm 0.3" in log.bad


def test_a_gradient_norm_that_is_none_is_told_from_a_loss_that_is_none(
    settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: Any) -> None:
        next(p for n, p in model.named_parameters() if "lora_B" in n).register_hook(lambda g: g * float("nan"))

    broken(monkeypatch, change)
    check = run_layer_here(training.run, settings)["steps"]
    assert check.status == FAIL and "step 1: the loss is finite" in check.text and "gradient norm is nan" in check.text


@pytest.mark.parametrize(
    ("ids", "precision", "words"),
    [([5, 6, 7], "fp32", "a sample of 3 tokens"), ([5] * 20, "fp16", "above 65504"), ([5] * 20, "fp32", "5e-05")],
)
def test_why_a_loss_is_no_number(settings: Settings, ids: list[int], precision: str, words: str) -> None:
    from envforge.verify.policy import Precision

    stack = HfStack(settings)
    policy = TrainingPolicy(max_length=64)
    batch = SafeCollator(stack.tokenizer(), policy)([{"input_ids": ids}])
    said = steps.why_not_finite(float("nan"), 3, 2, batch, stack.model(), policy, Precision(precision, ""))
    assert said.startswith("step 3, micro-batch 2: the loss is nan") and words in said


def test_a_checkpoint_that_cannot_be_read_back(
    settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers refuses torch.load under an older torch; its guard is made to refuse here too."""
    import transformers

    original = transformers.Trainer._load_optimizer_and_scheduler

    def refuse(self: Any, checkpoint: Any) -> None:
        if checkpoint is None:
            return original(self, checkpoint)
        raise ValueError("Due to a serious vulnerability issue in `torch.load` ... require users to upgrade torch")

    monkeypatch.setattr(transformers.Trainer, "_load_optimizer_and_scheduler", refuse)
    checks = run_layer_here(training.run, settings, steps=2)
    assert checks["trainer"].status == PASS
    assert checks["resume"].status == FAIL and "torch.load" in checks["resume"].text


def test_other_columns_do_not_reach_the_model(settings: Settings) -> None:
    rows = [{"input_ids": [5, 6, 7], "text": "raw", "title": "x", "labels": "y"}]
    assert set(SafeCollator(HfStack(settings).tokenizer())(rows)) == {"input_ids", "attention_mask", "labels"}


def test_odd_device_and_dtype_are_named(settings: Settings) -> None:
    import torch

    from envforge.verify.policy import Precision

    stack = HfStack(settings)
    policy = stack.policy()
    model = stack.training_model(policy)
    batches = steps.make_batches(SafeCollator(stack.tokenizer(), policy), policy, "cpu")
    recorder = Recorder("training")
    training.devices(recorder, model, batches, "cpu")
    training.dtypes(recorder, model, Precision("fp32", ""))
    assert [check.status for check in recorder.checks] == [PASS, PASS]
    batches[0]["labels"] = batches[0]["labels"].to("meta")
    training.devices(recorder, model, batches, "cpu")
    assert recorder.checks[-1].status == FAIL and "micro-batch 0: labels (meta)" in recorder.checks[-1].text
    name, first = next((n, p) for n, p in model.named_parameters() if p.requires_grad)
    first.data = first.data.to(torch.float16)
    training.dtypes(recorder, model, Precision("fp16", ""))
    assert recorder.checks[-1].status == FAIL and name in recorder.checks[-1].text
    training.dtypes(recorder, model, Precision("fp32", ""))
    assert recorder.checks[-1].status == FAIL and "several types" in recorder.checks[-1].text


def test_memory_that_grows_is_named() -> None:
    import torch

    kept = []
    watch = MemoryWatch("cpu")
    for _ in range(4):
        kept.append(torch.zeros(1024, 1024))
        watch.mark()
    recorder = Recorder("training")
    steps.memory_flat(recorder, watch)
    check = recorder.checks[0]
    assert check.status == FAIL and check.figures["creep_mib"] == pytest.approx(12, abs=0.5)
    assert "torch.float32 (1024, 1024)" in check.text
    assert len(kept) == 4


def test_base_weights_that_move(settings: Settings) -> None:
    stack = HfStack(settings)
    policy = stack.policy()
    model = stack.training_model(policy)
    before = adapters.snapshot(model)
    for parameter in model.parameters():
        parameter.data += 0.01
    recorder = Recorder("training")
    log = steps.Log(losses=[2.0, 1.0], norms=[1.0, 1.0], seconds=[0.1, 0.1])
    adapters.judge(recorder, model, before, log, policy, 2)
    checks = {check.id: check for check in recorder.checks}
    assert checks["training.base-still"].status == FAIL
    assert checks["training.loss-falls"].status == PASS


def test_a_loss_that_rises(settings: Settings) -> None:
    stack = HfStack(settings)
    model = stack.training_model(stack.policy())
    recorder = Recorder("training")
    log = steps.Log(losses=[1.0, 1.0, 1.1, 1.2], norms=[1.0] * 4, seconds=[0.1] * 4)
    adapters.judge(recorder, model, adapters.snapshot(model), log, stack.policy(), 4)
    checks = {check.id: check.status for check in recorder.checks}
    assert checks["training.loss-falls"] == FAIL
    assert checks["training.adapters-move"] == FAIL  # nothing was trained here


def test_what_the_layers_leave_each_other_gives_the_same_figures(
    settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, answers and effect with one model for all layers are those of layers that load it each for itself."""
    monkeypatch.setattr(HfStack, "extra_training", lambda *a: None)
    loads: list[Any] = []
    original = HfStack.as_it_is_on_disk

    def counting(self: HfStack, folder: str, dtype: Any) -> Any:
        loads.append(folder)
        return original(self, folder, dtype)

    monkeypatch.setattr(HfStack, "as_it_is_on_disk", counting)
    found = []
    for on in (False, True):
        share.start(on)
        loads.clear()
        run_layer_here(chat.run, settings)
        losses = run_layer_here(training.run, settings, steps=3)["steps"].figures["losses"]
        checks = run_layer_here(effect.run, settings)
        share.start(False)
        assert FAIL not in states(checks).values(), checks
        found.append(([*losses, checks["merge"].figures["adapter_effect"]], len(loads)))
    assert found[0][0] == pytest.approx(found[1][0])
    assert (found[0][1], found[1][1]) == (4, 2)  # with sharing: the base, and the merged model from disk


def test_a_base_that_training_changed_is_seen(
    settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HfStack, "extra_training", lambda *a: None)
    share.start(True)
    try:
        run_layer_here(chat.run, settings)
        run_layer_here(training.run, settings, steps=2)
        base = share.take("base")
        base.model.layers[0].mlp.up_proj.weight.data *= 1.5
        share.keep("base", base)
        check = only_failure(run_layer_here(effect.run, settings))
    finally:
        share.start(False)
    assert check.id == "effect.merge" and "the base model changed" in check.text


# distributed and attention --------------------------------------------------------------------------------------------


def test_two_real_ranks_over_gloo(settings: Settings, run_layer_here: Run) -> None:
    checks = run_layer_here(distributed.run, settings, processes=2)
    assert states(checks) == {"ranks": PASS, "all-reduce": PASS, "step": PASS, "transport": SKIP}
    assert checks["all-reduce"].figures["mib"] == 16
    # Each rank had a text of its own, so its own gradient was not the mean: something was really shared.
    assert all(value > 0.1 for value in checks["step"].figures["own_difference"].values())


def test_attention_kernels_are_compared_with_torch() -> None:
    """Stand-ins for the libraries' functions: one is right, one is scaled wrongly."""
    import torch

    def right(query: Any, key: Any, value: Any, scale: float | None = None) -> Any:
        moved = [part.float().transpose(1, 2) for part in (query, key, value)]
        return torch.nn.functional.scaled_dot_product_attention(*moved, scale=scale).transpose(1, 2).half()

    check = Check(id="environment.flash-attn-kernel", layer="environment")
    attention.agrees(check, torch, right, "cpu")
    assert check.figures["largest_difference"] < 1e-2
    with pytest.raises(Fail, match="other numbers"):
        attention.agrees(check, torch, lambda q, k, v: right(q, k, v, 1.0), "cpu")
    with pytest.raises(Fail, match="nan"):
        attention.agrees(check, torch, lambda q, k, v: q * float("nan"), "cpu")


# effect ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(settings: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings whose scratch folder holds a trained adapter."""
    monkeypatch.setattr(HfStack, "extra_training", lambda *a: None)
    run_layer_here(training.run, settings, steps=3)
    return settings


def test_no_adapter(settings: Settings, run_layer_here: Run) -> None:
    assert "left no adapter" in only_failure(run_layer_here(effect.run, settings)).text


def test_an_adapter_without_effect(trained: Settings, run_layer_here: Run) -> None:
    from safetensors.torch import load_file, save_file

    file = next((Path(trained.workdir) / "adapter").glob("adapter_model.safetensors"))
    save_file({name: tensor * 0 for name, tensor in load_file(file).items()}, file)
    check = only_failure(run_layer_here(effect.run, trained))
    assert check.id == "effect.merge" and "logits are those of the base" in check.text


def test_a_merge_that_does_nothing(trained: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfStack, "merge", lambda self, model: model.unload())
    check = only_failure(run_layer_here(effect.run, trained))
    assert check.id == "effect.merge" and "merging changed the logits" in check.text


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_position_embeddings", 512), ("rope_theta", 1.0), ("vocab_size", 399), ("rope_scaling", "linear")],
)
def test_a_damaged_configuration(
    key: str, value: Any, trained: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = HfStack.save_merged

    def damaging(self: HfStack, merged: Any, tokenizer: Any, folder: Path) -> None:
        original(self, merged, tokenizer, folder)
        config = json.loads((folder / "config.json").read_text())
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if key == "rope_theta":
            rope["rope_theta"] = value
            config["rope_theta"] = value
        elif key == "rope_scaling":
            rope.update(rope_type=value, factor=4.0)
        else:
            config[key] = value
        config["rope_parameters" if "rope_parameters" in config else "rope_scaling"] = rope or None
        (folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(HfStack, "save_merged", damaging)
    check = run_layer_here(effect.run, trained)["limits"]
    assert check.status == FAIL, check
    assert ("vocabulary" if key == "vocab_size" else "positions" if "position" in key else "rope") in check.text


def test_merged_weights_in_another_format(
    trained: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = HfStack.save_merged
    monkeypatch.setattr(HfStack, "save_merged", lambda self, m, t, f: original(self, m.float(), t, f))
    check = run_layer_here(effect.run, trained)["limits"]
    assert check.status == FAIL and "dtype: BF16 became F32" in check.text


def test_merged_weights_damaged_on_disk(
    trained: Settings, run_layer_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    original = HfStack.save_merged

    def damaging(self: HfStack, merged: Any, tokenizer: Any, folder: Path) -> None:
        original(self, merged, tokenizer, folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
        tensors[name] = tensors[name].flip(0).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(HfStack, "save_merged", damaging)
    check = only_failure(run_layer_here(effect.run, trained))
    assert check.id == "effect.reload" and "from disk" in check.text


def test_same_refuses_what_is_not_a_number() -> None:
    import torch

    fine = torch.randn(2, 3, 4)
    effect.same(fine, fine.clone(), 1e-6, "x")
    with pytest.raises(Fail):
        effect.same(fine * float("nan"), fine, 1.0, "x")
    with pytest.raises(Fail, match="shapes"):
        effect.same(fine[:1], fine, 1.0, "x")
