"""Effect: what was trained is still there after merging, saving and loading, and nothing else changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from envforge.verify import share
from envforge.verify.layers.data import max_positions
from envforge.verify.layers.paths import ADAPTER, FRAMEWORK_MERGED, MERGED
from envforge.verify.layers.talk import ask, encode_text, judge_answer, logits_of
from envforge.verify.record import Fail, Recorder
from envforge.verify.settings import Settings
from envforge.verify.stacks import open_stack
from envforge.verify.stacks.hf import HfStack
from envforge.verify.texts import SAMPLES, first_sentence
from envforge.verify.weights import embedding_rows, stored_dtype

# Difference of logits (root mean square) that counts as the same, as a share of their spread. Merging rounds each
# weight once to its own format: float32 keeps 24 bits, float16 11, bfloat16 8.
TOLERANCE = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 8e-2}
NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def run(settings: Settings, recorder: Recorder) -> None:
    """Merge, save, reload, compare, chat."""
    stack = open_stack(settings)
    adapter, folder = Path(settings.workdir) / ADAPTER, Path(settings.workdir) / MERGED
    tolerance = TOLERANCE[stack.precision().name]
    tokenizer = batch = with_adapter = merged_logits = None
    with recorder.check("merge") as check:
        stack.start()
        import torch

        torch.manual_seed(settings.seed)
        if not adapter.is_dir():
            raise Fail("the training layer left no adapter")
        tokenizer = stack.tokenizer()
        batch = encode_text(tokenizer, first_sentence(SAMPLES[0]), settings.device)
        base = stack.model()
        base_logits = logits_of(base, batch)
        unchanged(base_logits, tolerance)
        if not stack.in_place:
            base = None  # it loads its own: two would not fit on some GPUs
        model = stack.with_adapter(adapter, base)
        del base
        with_adapter = logits_of(model, batch)
        effect = spread_share(with_adapter, base_logits)
        check.figure(adapter_effect=effect)
        if effect == 0.0:
            raise Fail("with the adapter the logits are those of the base: the adapter was not loaded or is empty")
        own = stack.own_export(model, tokenizer, Path(settings.workdir) / FRAMEWORK_MERGED)
        if own:
            check.figure(framework_export=own)
        merged = stack.merge(model)
        merged_logits = logits_of(merged, batch)
        check.figure(**agreement(merged_logits, with_adapter), tolerance=tolerance)
        same(merged_logits, with_adapter, tolerance, "merging changed the logits")
        check.say("the merged model gives the logits that base and adapter give together")
        if spread_share(merged_logits, with_adapter) > effect / 2:
            check.warn(f"rounding is as large as what the adapter does ({effect:.2g} of the spread): train more steps")
        stored = stored_dtype(settings.model)
        if stored in NAMES:
            # What is written must be as the base is, whatever the proof computed in: that rounds each weight once.
            # Only the weights: rounding the rotary table too would change it for this process alone.
            kind = getattr(torch, NAMES[stored])
            for parameter in merged.parameters():
                parameter.data = parameter.data.to(kind).to(parameter.dtype)
            rounded = logits_of(merged, batch)
            check.figure(rounding=spread_share(rounded, merged_logits))
            merged, merged_logits = merged.to(kind), rounded
        stack.save_merged(merged, tokenizer, folder)
        files = sorted(path.name for path in folder.iterdir())
        check.figure(files=files)
        del model, merged
    if recorder.failed or tokenizer is None:
        return
    limits(recorder, settings.model, str(folder))
    reloaded: Any = None
    with recorder.check("reload") as check:
        reloaded = stack.model(str(folder))
        logits = logits_of(reloaded, batch)
        check.figure(**agreement(logits, merged_logits), tolerance=tolerance)
        same(logits, merged_logits, tolerance, "the model from disk gives other logits than the one that was saved")
        check.say("the model from disk gives the same logits")
    if reloaded is None or recorder.failed:
        return
    own_export(settings, recorder, stack, batch, with_adapter)
    with recorder.check("chat") as check:
        answer = ask(reloaded, stack.tokenizer(str(folder)), settings.prompt, settings.max_new_tokens, settings.device)
        recorder.note("chat_merged", {"prompt": settings.prompt, "answer": answer.text})
        limit = max_positions(reloaded.config)
        check.figure(prompt_tokens=answer.prompt_tokens, new_tokens=answer.new_tokens, max_positions=limit)
        judge_answer(answer, settings.expect, "the merged model")
        check.say(f'"{answer.text}"')


def unchanged(logits: Any, tolerance: float) -> None:
    """Raises:
    Fail: the base gives other logits than it gave in the chat layer, before adapters were trained on it.
    """
    before = share.take("base-logits")
    if before is not None:
        same(logits, before, tolerance, "the base model changed while adapters were trained on it")


def own_export(settings: Settings, recorder: Recorder, stack: HfStack, batch: Any, expected: Any) -> None:
    """What the framework's own export wrote loads and gives the logits of base and adapter, within 16-bit rounding."""
    folder = Path(settings.workdir) / FRAMEWORK_MERGED
    if not folder.is_dir():
        return
    with recorder.check("framework-export") as check:
        stored = stored_dtype(str(folder))
        logits = logits_of(stack.model(str(folder)), batch)
        check.figure(**agreement(logits, expected), stored=stored, base_stored=stored_dtype(settings.model))
        if agreement(logits, expected)["same_first_choice"] < 0.9:
            raise Fail("the framework's own export gives other logits than base and adapter")
        check.say("the framework's own export loads and agrees")
        if stored != stored_dtype(settings.model):
            check.warn(f"it is stored as {stored}, the base as {stored_dtype(settings.model)}")


def spread_share(one: Any, other: Any) -> float:
    """Root mean square of the difference of two sets of logits, as a share of the spread of the second.

    Not the largest difference: of millions of logits one always lies far out after rounding to bfloat16.
    """
    return float((one - other).pow(2).mean().sqrt() / other.std())


def agreement(one: Any, other: Any) -> dict[str, float]:
    """Figures of how close two sets of logits are."""
    top = float((one.argmax(-1) == other.argmax(-1)).float().mean())
    return {"difference": spread_share(one, other), "same_first_choice": round(top, 4)}


def same(one: Any, other: Any, tolerance: float, what: str) -> None:
    """Raises:
    Fail: shapes differ, or the difference is beyond the tolerance, or not a number.
    """
    if one.shape != other.shape:
        raise Fail(f"{what}: shapes {tuple(one.shape)} and {tuple(other.shape)}")
    difference = spread_share(one, other)
    if not difference <= tolerance:
        raise Fail(f"{what}: by {difference:.3g} of their spread, {tolerance:g} is allowed")


def limits(recorder: Recorder, base: str, merged: str) -> None:
    """Vocabulary, positions, rotary settings and number formats of the merged folder are the base's."""
    with recorder.check("limits") as check:
        one, two = facts_of(base), facts_of(merged)
        check.figure(base=one, merged=two)
        # What the base does not declare cannot be compared: a newer release writes defaults out.
        changed = [f"{name}: {one[name]} became {two[name]}" for name in one if one[name] not in (None, two[name])]
        if changed:
            raise Fail(f"the merged model is not as the base is: {'; '.join(changed)}")
        check.say(
            f"{two['rows'] or two['vocabulary']} rows of vocabulary, {two['positions']} positions, rotary settings and "
            f"{two['dtype']} are the base's"
        )


def facts_of(folder: str) -> dict[str, Any]:
    """What must survive a merge, read from config.json and the headers of the weights."""
    data = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    inner = data.get("text_config", data)
    rope = dict(inner.get("rope_parameters") or inner.get("rope_scaling") or {})
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    theta = rope.pop("rope_theta", None) or inner.get("rope_theta")
    scaling = {key: value for key, value in sorted(rope.items()) if key != "type"}
    return {
        "vocabulary": inner.get("vocab_size"),
        "rows": embedding_rows(folder),
        "positions": inner.get("max_position_embeddings"),
        "rope_theta": theta,
        "rope_type": kind,
        "rope_scaling": scaling if kind != "default" else None,
        "layers": inner.get("num_hidden_layers"),
        "hidden": inner.get("hidden_size"),
        "dtype": stored_dtype(folder),
    }
