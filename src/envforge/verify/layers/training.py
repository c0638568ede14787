"""Training: a few LoRA steps that must lower a finite loss, with gradients that are finite and adapters that move.

Each optimizer step goes over the same micro-batches, so that the losses of the steps can be compared.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envforge.verify.layers.chat import memory_figures
from envforge.verify.layers.paths import ADAPTER
from envforge.verify.policy import SHORT, MemoryWatch, Precision, SafeCollator, TrainingPolicy
from envforge.verify.record import Fail, Recorder, Skip
from envforge.verify.settings import Settings
from envforge.verify.stacks import open_stack
from envforge.verify.texts import SAMPLES, long_text


@dataclass
class Log:
    """What the steps did: mean loss and gradient norm of each step, and the first thing that went wrong."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    bad: str = ""


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
        take_steps(model, batches, policy, precision, settings.device, settings.steps, watch, log)
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


def make_batches(collator: SafeCollator, policy: TrainingPolicy, device: str) -> list[dict[str, Any]]:
    """The micro-batches of one optimizer step, on the device."""
    batches = []
    for index in range(policy.accumulation):
        texts = [SAMPLES[(index * policy.batch_size + k) % len(SAMPLES)] for k in range(policy.batch_size)]
        if device == "cpu":  # a sentence is enough there
            texts = [text.partition(". ")[0] + "." for text in texts]
        batches.append({name: tensor.to(device) for name, tensor in collator(texts).items()})
    return batches


def lora_parts(model: Any) -> dict[str, list[tuple[str, Any]]]:
    """Trainable parameters by kind: `A`, `B`, `other`."""
    parts: dict[str, list[tuple[str, Any]]] = {"A": [], "B": [], "other": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            lower = name.lower()
            kind = "A" if "lora_a" in lower else "B" if "lora_b" in lower else "other"
            parts[kind].append((name, parameter))
    return parts


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


def snapshot(model: Any) -> dict[str, Any]:
    """Copies of the trainable parameters, and of a few frozen ones, before the first step."""
    kept = {name: p.detach().float().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad and p.is_floating_point()]
    for name, parameter in frozen[:: max(1, len(frozen) // 4)][:4]:
        kept[name] = parameter.detach().float().cpu().clone()
    return kept


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


def judge(recorder: Recorder, model: Any, before: dict[str, Any], log: Log, policy: TrainingPolicy, steps: int) -> None:
    """Loss down, gradients there, adapters moved, base still."""
    with recorder.check("loss-falls") as check:
        part = max(1, len(log.losses) // 4)
        first, last = sum(log.losses[:part]) / part, sum(log.losses[-part:]) / part
        check.figure(first=round(first, 5), last=round(last, 5), steps=len(log.losses))
        if len(log.losses) < 2:
            raise Skip("one step tells nothing about the direction")
        if not last < first:
            raise Fail(
                f"the loss did not fall over {len(log.losses)} steps on the same samples: {first:.4f} to {last:.4f}"
            )
        check.say(f"{first:.4f} to {last:.4f}")
    with recorder.check("gradients") as check:
        finite = [norm for norm in log.norms if math.isfinite(norm)]
        check.figure(norms=log.norms, overflowed=len(log.norms) - len(finite))
        if not finite or max(finite) == 0.0:
            raise Fail("every gradient is zero: nothing reaches the adapters (frozen inputs under checkpointing?)")
        check.say(f"norms {min(finite):.3g} to {max(finite):.3g}, all finite")
    adapters_move(recorder, model, before, policy, steps)
    with recorder.check("base-still") as check:
        now = dict(model.named_parameters())
        moved = [
            name
            for name, old in before.items()
            if not now[name].requires_grad and bool((now[name].detach().float().cpu() != old).any())
        ]
        check.figure(looked_at=sum(1 for name in before if not now[name].requires_grad))
        if moved:
            raise Fail(f"frozen weights changed: {', '.join(moved[:3])}")
        check.say("the frozen weights that were looked at did not change")


def adapters_move(recorder: Recorder, model: Any, before: dict[str, Any], policy: TrainingPolicy, steps: int) -> None:
    """lora_B moves from the first step, lora_A from the second: both by more than a floor.

    An Adam step moves each element by about the learning rate; the floor is a hundredth of that, over the steps.
    """
    with recorder.check("adapters-move") as check:
        parts = lora_parts(model)
        still: dict[str, list[str]] = {}
        for kind in ("A", "B"):
            change = count = 0.0
            still[kind] = []
            for name, parameter in parts[kind]:
                moved = float((parameter.detach().float().cpu() - before[name]).norm())
                change += moved**2
                count += parameter.numel()
                if moved <= 0.01 * policy.learning_rate * math.sqrt(parameter.numel()):
                    still[kind].append(name)
            floor = 0.01 * policy.learning_rate * math.sqrt(count)
            check.figure(
                **{f"lora_{kind.lower()}": round(math.sqrt(change), 6), f"floor_{kind.lower()}": round(floor, 6)}
            )
        check.figure(unmoved_a=len(still["A"]), unmoved_b=len(still["B"]))
        figures = check.figures
        if figures["lora_b"] <= figures["floor_b"]:
            raise Fail(
                f"lora_B changed by {figures['lora_b']:.3g} over {steps} steps, below the floor "
                f"{figures['floor_b']:.3g}: the adapters do not train"
            )
        if steps > 1 and figures["lora_a"] <= figures["floor_a"]:
            raise Fail(f"lora_A changed by {figures['lora_a']:.3g} over {steps} steps, below {figures['floor_a']:.3g}")
        check.say(f"lora_B by {figures['lora_b']:.3g}, lora_A by {figures['lora_a']:.3g}")
        if still["B"]:
            check.warn(f"{len(still['B'])} of {len(parts['B'])} lora_B did not move, e.g. {still['B'][0]}")


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
        with nullcontext() if precision.name == "fp32" else torch.autocast(settings.device, dtype=precision.dtype):
            loss = model(**batch).loss
        loss.backward()
        if settings.device == "cuda":
            torch.cuda.synchronize()
            check.figure(peak_mib=round(torch.cuda.max_memory_allocated() / 2**20, 1))
        model.zero_grad(set_to_none=True)
        check.figure(tokens=int(batch["input_ids"].numel()), pass_seconds=round(time.monotonic() - start, 2))
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Fail(f"the loss of a batch at the cap is {value}")
        check.say(f"a batch of {settings.batch_size} x {batch['input_ids'].shape[1]} tokens goes through")
