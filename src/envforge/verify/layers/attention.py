"""Attention kernels of flash-attn and xformers, run where they are installed and the device can: as torch's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from envforge.verify.record import Check, Fail, Recorder, Skip
from envforge.verify.settings import Settings
from envforge.verify.stacks.hf import version_of

SHAPE = (1, 128, 4, 64)  # batch, length, heads, head size: what both libraries take
TOLERANCE = 2e-2  # largest difference of two float16 results of this size


def kernels(settings: Settings, recorder: Recorder, torch: Any) -> None:
    """One check for each of the two that is installed."""
    for name, function in (("flash-attn", flash_attn), ("xformers", xformers)):
        if not version_of(name):
            continue
        with recorder.check(f"{name}-kernel") as check:
            if settings.device != "cuda" or settings.grade != "full":
                raise Skip("its kernels are for GPUs")
            capability = torch.cuda.get_device_capability()
            if name == "flash-attn" and capability < (8, 0):
                raise Skip(f"FlashAttention 2 wants sm_80 or newer, this is sm_{capability[0]}{capability[1]}")
            agrees(check, torch, function(), "cuda")
            check.say("its kernel ran and agrees with torch's own attention")


def flash_attn() -> Callable[[Any, Any, Any], Any]:
    """FlashAttention's function over (batch, length, heads, size)."""
    found: Callable[[Any, Any, Any], Any] = importlib.import_module("flash_attn").flash_attn_func
    return found


def xformers() -> Callable[[Any, Any, Any], Any]:
    """xformers' function over (batch, length, heads, size)."""
    found: Callable[[Any, Any, Any], Any] = importlib.import_module("xformers.ops").memory_efficient_attention
    return found


def agrees(check: Check, torch: Any, function: Callable[[Any, Any, Any], Any], device: str) -> None:
    """Run once and compare with torch's attention in float32.

    Raises:
        Fail: the numbers differ, or are none.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(SHAPE, generator=generator).to(device, torch.float16) for _ in range(3))
    got = function(query, key, value).float()
    moved = [part.float().transpose(1, 2) for part in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*moved).transpose(1, 2)
    difference = float((got - expected).abs().max())
    check.figure(largest_difference=difference, tolerance=TOLERANCE)
    if not difference <= TOLERANCE:
        raise Fail(f"its kernel gives other numbers than torch's attention: by up to {difference:.3g}")
