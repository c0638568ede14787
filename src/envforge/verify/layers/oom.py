"""Out of memory on a GPU, by the numbers: the work is too large, the memory is in pieces, or someone else holds it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from envforge.verify.record import Check, Fail

_ASKED = re.compile(r"Tried to allocate ([\d.]+) ([KMG]i?B)")
_UNIT = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


@dataclass(frozen=True)
class Memory:
    """A GPU when it refused, in MiB: asked for, free, total, held by this process as tensors and as reserve, and the
    largest piece of the reserve that is free."""

    asked: float
    free: float
    total: float
    allocated: float
    reserved: float
    largest: float


def explain(check: Check, torch: Any, error: BaseException) -> None:
    """Nothing where the error is another one.

    Raises:
        Fail: what the numbers say, and what helps.
    """
    kind = getattr(torch, "OutOfMemoryError", None) or getattr(torch.cuda, "OutOfMemoryError", None)
    if kind is None or not isinstance(error, kind):
        return
    memory = measure(torch, str(error))
    check.figure(out_of_memory=asdict(memory))
    raise Fail(f"out of GPU memory: {sentence(memory)}") from error


def measure(torch: Any, message: str) -> Memory:
    """Ask torch and the driver now, before anything is freed."""
    found = _ASKED.search(message)
    asked = float(found.group(1)) * _UNIT[found.group(2)[0]] if found else 0.0
    free, total = torch.cuda.mem_get_info()
    blocks = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    figures = (free, total, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), max(blocks, default=0))
    return Memory(asked, *(round(value / 2**20, 1) for value in figures))


def sentence(memory: Memory) -> str:
    """Which of the three it is."""
    unused = memory.reserved - memory.allocated
    figures = (
        f"{memory.asked:.0f} MiB asked; {memory.free:.0f} free on the device, {memory.allocated:.0f} in tensors, "
        f"{unused:.0f} reserved and unused, {memory.largest:.0f} in the largest piece of it"
    )
    others = memory.total - memory.free - memory.reserved
    if memory.asked and unused + memory.free > 1.2 * memory.asked and memory.largest < memory.asked:
        advice = "the reserve is in pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or batches of one length"
    elif others > max(1024.0, 0.25 * memory.total):
        advice = (
            f"about {others:.0f} MiB are held by other processes: look with nvidia-smi, end your own left-over ones"
        )
    else:
        advice = (
            "the work is too large: gradient checkpointing, max_length at the 95th percentile of your data "
            "(--data FILE tells it), a smaller batch with more accumulation"
        )
    return f"{figures}; {advice}"
