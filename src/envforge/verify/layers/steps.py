"""The loop of the training layer: LoRA steps that stop at the first number that is none, and say where.

Each optimizer step goes over the same micro-batches, so that the losses of the steps can be compared.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from envforge.verify.policy import SHORT, MemoryWatch, Precision, SafeCollator, TrainingPolicy
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.texts import SAMPLES, first_sentence


@dataclass
class Log:
    """What the steps did: mean loss and gradient norm of each step, and the first thing that went wrong."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    bad: str = ""


def make_batches(collator: SafeCollator, policy: TrainingPolicy, device: str) -> list[dict[str, Any]]:
    """The micro-batches of one optimizer step, on the device."""
    batches = []
    for index in range(policy.accumulation):
        texts = [SAMPLES[(index * policy.batch_size + k) % len(SAMPLES)] for k in range(policy.batch_size)]
        if device == "cpu":  # a sentence is enough there
            texts = [first_sentence(text) for text in texts]
        batches.append({name: tensor.to(device) for name, tensor in collator(texts).items()})
    return batches


def take_steps(
    model: Any,
    batches: list[dict[str, Any]],
    policy: TrainingPolicy,
    precision: Precision,
    device: str,
    steps: int,
    watch: MemoryWatch,
    log: Log,
) -> None:
    """The loop: accumulate, clip, step. Stops at the first loss or gradient that is not finite, and says where."""
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=policy.learning_rate, weight_decay=0.0)
    scaler = grad_scaler(torch) if precision.name == "fp16" and device == "cuda" else None
    for step in range(1, steps + 1):
        start = time.monotonic()
        losses = []
        for number, batch in enumerate(batches, 1):
            mixed = nullcontext() if precision.name == "fp32" else torch.autocast(device, dtype=precision.dtype)
            with mixed:
                loss = model(**batch).loss
            value = float(loss.detach())
            if not math.isfinite(value):
                log.losses.append(value)
                log.bad = why_not_finite(value, step, number, batch, model, policy, precision)
                return
            losses.append(value)
            share = loss / len(batches)
            (scaler.scale(share) if scaler else share).backward()
            log.tokens += int(batch["attention_mask"].sum())
            del loss, share
        if scaler:
            scaler.unscale_(optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, policy.max_grad_norm))
        log.losses.append(round(sum(losses) / len(losses), 6))
        log.norms.append(round(norm, 6))
        # A scaler starts too high on purpose: its first steps overflow, are left out, and lower the scale.
        if not math.isfinite(norm) and not (scaler and step <= 4):
            log.bad = f"step {step}: the loss is finite ({log.losses[-1]}) but the gradient norm is {norm}: " + (
                "float16 overflow; use bf16 where native, or float32" if precision.name == "fp16" else advice(policy)
            )
            return
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.seconds.append(round(time.monotonic() - start, 3))
        # The first step makes the optimizer's state. On the CPU a look is dear: it goes through all Python objects.
        if step >= 2 and (device != "cpu" or step in (2, (steps + 2) // 2, steps)):
            watch.mark()


def grad_scaler(torch: Any) -> Any:
    """The loss scaler for float16; it moved in torch 2.3."""
    return torch.amp.GradScaler("cuda") if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler()


def advice(policy: TrainingPolicy) -> str:
    """What lowers the risk of a NaN."""
    lower = policy.cautious()
    return (
        f"try max_grad_norm {lower.max_grad_norm}, learning rate {lower.learning_rate:g} (from {policy.learning_rate:g}"
        ") with warm-up and a cosine schedule, bf16 where it is native"
    )


def why_not_finite(
    value: float,
    step: int,
    number: int,
    batch: dict[str, Any],
    model: Any,
    policy: TrainingPolicy,
    precision: Precision,
) -> str:
    """Where the loss left the numbers, and what stands there."""
    import torch

    text = f"step {step}, micro-batch {number}: the loss is {value}"
    damaged = [name for name, p in model.named_parameters() if p.is_floating_point() and not torch.isfinite(p).all()]
    supervised = int((batch["labels"][:, 1:] != -100).sum())
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    if damaged:
        text += f"; the weights themselves are not finite, first {damaged[0]} ({len(damaged)} in all)"
    elif supervised == 0:
        text += "; no token of this batch is to be predicted (all labels are -100)"
    elif min(lengths) < SHORT:
        text += f"; it holds a sample of {min(lengths)} tokens (degenerate below {SHORT})"
    elif precision.name == "fp16":
        text += "; float16 overflows above 65504: use bf16 where native, or float32"
    else:
        text += "; " + advice(policy)
    return text


def memory_flat(recorder: Recorder, watch: MemoryWatch) -> None:
    """What is allocated at the end of each step does not grow."""
    with recorder.check("memory-flat") as check:
        creep = watch.creep(skip=1)
        check.figure(marks_mib=watch.marks, creep_mib=creep)
        if len(watch.marks) < 3:
            raise Skip("too few steps to see a trend")
        allowed = max(1.0, 0.005 * watch.marks[0])
        if creep > allowed:
            raise Fail(
                f"memory grew by {creep:.1f} MiB from step 2 to the last (allowed {allowed:.1f}); largest holders: "
                f"{'; '.join(watch.holders())}"
            )
        check.say(f"{watch.marks[-1]:.0f} MiB after a step, {creep:+.2f} from step 2 to the last")
