"""The distributed and effect layers, and what the layers leave each other.

The model is tiny (see conftest); each test breaks exactly one thing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from proof_parts import Run, only_failure, states

from envforge.verify.layers import attention, distributed, effect, training
from envforge.verify.record import FAIL, PASS, SKIP, Check, Fail
from envforge.verify.settings import Settings
from envforge.verify.stacks.hf import HfStack

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
