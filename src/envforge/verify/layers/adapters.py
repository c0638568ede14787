"""What the steps must have done: loss down, gradients there, both halves of the adapters moved, the base still."""

from __future__ import annotations

import math
from typing import Any

from envforge.verify.layers.steps import Log
from envforge.verify.policy import TrainingPolicy
from envforge.verify.record import Fail, Recorder, Skip


def lora_parts(model: Any) -> dict[str, list[tuple[str, Any]]]:
    """Trainable parameters by kind: `A`, `B`, `other`."""
    parts: dict[str, list[tuple[str, Any]]] = {"A": [], "B": [], "other": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            lower = name.lower()
            kind = "A" if "lora_a" in lower else "B" if "lora_b" in lower else "other"
            parts[kind].append((name, parameter))
    return parts


def snapshot(model: Any) -> dict[str, Any]:
    """Copies of the trainable parameters, and of a few frozen ones, before the first step."""
    kept = {name: p.detach().float().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad and p.is_floating_point()]
    for name, parameter in frozen[:: max(1, len(frozen) // 4)][:4]:
        kept[name] = parameter.detach().float().cpu().clone()
    return kept


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
