"""Training: a few LoRA steps that must lower a finite loss, with gradients that are finite and adapters that move."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from envforge.verify.layers import oom
from envforge.verify.layers.adapters import judge, lora_parts, snapshot
from envforge.verify.layers.chat import memory_figures
from envforge.verify.layers.paths import ADAPTER
from envforge.verify.layers.steps import Log, make_batches, memory_flat, take_steps
from envforge.verify.policy import MemoryWatch, Precision, SafeCollator, TrainingPolicy
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.settings import Settings
from envforge.verify.stacks import open_stack
from envforge.verify.texts import long_text


def run(settings: Settings, recorder: Recorder) -> None:
    """Load, look, step, judge, save."""
    stack = open_stack(settings)
    policy = stack.policy()
    model = tokenizer = None
    with recorder.check("load") as check:
        stack.start()
        import torch

        torch.manual_seed(settings.seed)
        start = time.monotonic()
        tokenizer = stack.tokenizer()
        model = stack.training_model(policy)
        check.figure(load_seconds=round(time.monotonic() - start, 2), policy=policy.to_json())
        check.say(f"adapters of rank {policy.lora_r} on {type(model).__name__}")
    if model is None:
        return
    precision = stack.precision()
    recorder.note("precision", {"name": precision.name, "reason": precision.reason})
    batches = make_batches(SafeCollator(tokenizer, policy), policy, settings.device)
    trainable(recorder, model, policy)
    devices(recorder, model, batches, settings.device)
    dtypes(recorder, model, precision)
    if recorder.failed:
        return
    before = snapshot(model)
    watch = MemoryWatch(settings.device)
    log = Log()
    with recorder.check("steps") as check:
        try:
            take_steps(model, batches, policy, precision, settings.device, settings.steps, watch, log)
        except RuntimeError as error:
            oom.explain(check, torch, error)
            raise
        recorder.note("losses", log.losses)
        recorder.note("gradient_norms", log.norms)
        check.figure(
            steps=len(log.losses),
            losses=log.losses,
            seconds_per_step=round(sum(log.seconds) / max(1, len(log.seconds)), 3),
            tokens_per_second=round(log.tokens / max(1e-6, sum(log.seconds)), 1),
            longest_micro_batch=max(int(batch["input_ids"].shape[1]) for batch in batches),
            micro_batches=len(batches),
            **memory_figures(settings.device),
        )
        if log.bad:
            raise Fail(log.bad)
        check.say(f"{len(log.losses)} steps of {policy.batch_size} x {policy.accumulation} in {precision.name}")
    if recorder.failed:
        return
    judge(recorder, model, before, log, policy, settings.steps)
    memory_flat(recorder, watch)
    full_length(settings, recorder, model, SafeCollator(tokenizer, policy), precision)
    with recorder.check("save") as check:
        folder = Path(settings.workdir) / ADAPTER
        stack.save_adapter(model, tokenizer, folder)
        files = sorted(path.name for path in folder.iterdir())
        check.figure(files=files, mib=round(sum(path.stat().st_size for path in folder.iterdir()) / 2**20, 2))
        if not any(name.startswith("adapter_model") for name in files):
            raise Fail(f"no adapter weights were written, only {files}")
        check.say("adapter written")
    stack.extra_training(recorder, model, tokenizer)
    stack.leave_base(model)


def trainable(recorder: Recorder, model: Any, policy: TrainingPolicy) -> None:
    """Something can be trained, and it is the adapters."""
    with recorder.check("trainable") as check:
        parts = lora_parts(model)
        count = sum(parameter.numel() for group in parts.values() for _, parameter in group)
        total = sum(parameter.numel() for parameter in model.parameters())
        check.figure(trainable=count, total=total, lora_a=len(parts["A"]), lora_b=len(parts["B"]), r=policy.lora_r)
        check.figure(
            scaling=round(policy.lora_alpha / policy.lora_r, 3), other=[name for name, _ in parts["other"]][:5]
        )
        if count == 0:
            raise Fail("no parameter is trainable: the adapters were not attached, or everything was frozen")
        if not parts["A"] or not parts["B"]:
            raise Fail("there are trainable parameters, but no LoRA pairs among them")
        check.say(f"{count:,} of {total:,} parameters ({100 * count / total:.2f} %)")
        if not 0.1 <= policy.lora_alpha / policy.lora_r <= 8:
            check.warn(f"alpha / r is {policy.lora_alpha / policy.lora_r:.2f}; usual are 1 and 2")
        if parts["other"]:
            check.warn(f"{len(parts['other'])} trainable parameters are no adapters, e.g. {parts['other'][0][0]}")


def devices(recorder: Recorder, model: Any, batches: list[dict[str, Any]], device: str) -> None:
    """Parameters, buffers, inputs and labels lie on one device."""
    with recorder.check("devices") as check:
        places: Counter[str] = Counter()
        odd: list[str] = []
        named = [*model.named_parameters(), *model.named_buffers()]
        named += [
            (f"micro-batch {n}: {key}", tensor) for n, batch in enumerate(batches) for key, tensor in batch.items()
        ]
        for name, tensor in named:
            places[str(tensor.device)] += 1
            if tensor.device.type != device:
                odd.append(f"{name} ({tensor.device})")
        check.figure(places=dict(places), odd=odd[:5])
        if odd:
            raise Fail(f"not on {device}: {', '.join(odd[:3])}" + (f" and {len(odd) - 3} more" if len(odd) > 3 else ""))
        check.say(f"parameters, inputs and labels on {', '.join(places)}")


def dtypes(recorder: Recorder, model: Any, precision: Precision) -> None:
    """Number formats by design: one for the frozen weights, float32 or the same for the adapters."""
    with recorder.check("dtypes") as check:
        import torch

        frozen: Counter[str] = Counter()
        moving: Counter[str] = Counter()
        names: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            kind = str(parameter.dtype).replace("torch.", "")
            (moving if parameter.requires_grad else frozen)[kind] += 1
            names.setdefault(("trainable " if parameter.requires_grad else "frozen ") + kind, name)
        check.figure(frozen=dict(frozen), trainable=dict(moving), example=names)
        wrong = [kind for kind in moving if not getattr(torch, kind).is_floating_point]
        if wrong:
            raise Fail(f"trainable parameters of type {wrong}: they cannot have gradients")
        if precision.name == "fp16" and "float16" in moving:
            raise Fail(
                f"trainable parameters in float16 (e.g. {names['trainable float16']}): the gradient scaler refuses to "
                "unscale them; keep adapters in float32"
            )
        if len(moving) > 1:
            raise Fail(f"trainable parameters of several types {dict(moving)}: e.g. {names}")
        check.say(f"frozen {dict(frozen)}, trainable {dict(moving)}")
        floating = [kind for kind in frozen if getattr(torch, kind).is_floating_point]
        if len(floating) > 1:
            check.warn(f"frozen weights of several types {dict(frozen)} (norms in float32 are normal)")


def full_length(
    settings: Settings, recorder: Recorder, model: Any, collator: SafeCollator, precision: Precision
) -> None:
    """One forward and backward pass at the cap: the most memory that training will ask for with this batch size."""
    with recorder.check("longest-batch") as check:
        if settings.device == "cpu" and settings.max_length > 256:
            raise Skip(f"a batch of {settings.max_length} tokens takes minutes on a CPU; --max-length 256 runs it")
        import torch

        texts = [long_text(2 * settings.max_length)] * settings.batch_size
        batch = {name: tensor.to(settings.device) for name, tensor in collator(texts).items()}
        if settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        try:
            with nullcontext() if precision.name == "fp32" else torch.autocast(settings.device, dtype=precision.dtype):
                loss = model(**batch).loss
            loss.backward()
        except RuntimeError as error:
            oom.explain(check, torch, error)
            raise
        if settings.device == "cuda":
            torch.cuda.synchronize()
            check.figure(peak_mib=round(torch.cuda.max_memory_allocated() / 2**20, 1))
        model.zero_grad(set_to_none=True)
        check.figure(tokens=int(batch["input_ids"].numel()), pass_seconds=round(time.monotonic() - start, 2))
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Fail(f"the loss of a batch at the cap is {value}")
        check.say(f"a batch of {settings.batch_size} x {batch['input_ids'].shape[1]} tokens goes through")
