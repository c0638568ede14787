"""The training layer: every check passes on a sound model and fails on a broken one.

The model is tiny (see conftest); each test breaks exactly one thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from proof_parts import Run, broken, only_failure, states

from envforge.verify import share
from envforge.verify.layers import adapters, chat, effect, steps, training
from envforge.verify.policy import IGNORE, MemoryWatch, SafeCollator, TrainingPolicy
from envforge.verify.record import FAIL, PASS, Recorder
from envforge.verify.settings import Settings
from envforge.verify.stacks.hf import HfStack


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
