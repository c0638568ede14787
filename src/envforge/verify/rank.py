"""One rank of the distributed layer: `python -m envforge.verify.rank SETTINGS SAID`, with torchrun's variables set."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.verify.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    Say = Callable[..., None]

MIB = {"cpu": 16, "cuda": 256}  # size of the tensor that is added up
ROUNDS = 5


def main(argv: list[str]) -> int:
    """Runs the work of this rank and writes down each phase as it begins."""
    from envforge.verify.stage import end_with_parent, quiet

    end_with_parent()
    quiet()
    settings, said = Settings.load(Path(argv[0])), Path(argv[1])

    def say(phase: str, **figures: Any) -> None:
        with said.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": phase, "figures": figures}) + "\n")

    module, _, name = settings.targets.get("ranks", "envforge.verify.rank:work").partition(":")
    getattr(importlib.import_module(module), name)(
        settings, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), say
    )
    return 0


def work(settings: Settings, rank: int, world: int, say: Say) -> None:
    """Meet, add up, take a step, part."""
    say("import")
    import datetime

    import torch
    from torch import distributed

    device = f"cuda:{os.environ['LOCAL_RANK']}" if settings.device == "cuda" else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    say("meeting")
    limit = datetime.timedelta(seconds=max(10.0, settings.limits.get("distributed", 600.0)))
    distributed.init_process_group("nccl" if device != "cpu" else "gloo", timeout=limit)
    try:
        add_up(torch, device, rank, world, say)
        step(torch, settings, device, rank, world, say)
        say("end")
    finally:
        distributed.destroy_process_group()


def add_up(torch: Any, device: str, rank: int, world: int, say: Say) -> None:
    """All-reduce of a known tensor: is the sum right, and how long does it take?"""
    say("all-reduce")
    mib = MIB["cuda" if device != "cpu" else "cpu"]
    tensor = torch.full((mib * 2**18,), float(rank + 1), device=device)
    torch.distributed.all_reduce(tensor)
    right = bool((tensor == world * (world + 1) / 2).all())
    tensor.fill_(0.0)
    torch.distributed.barrier()
    synchronize(torch, device)
    start = time.monotonic()
    for _ in range(ROUNDS):
        torch.distributed.all_reduce(tensor)
    synchronize(torch, device)
    seconds = (time.monotonic() - start) / ROUNDS
    say("all-reduce done", sum_right=right, all_reduce_mib=mib, all_reduce_seconds=seconds)


def synchronize(torch: Any, device: str) -> None:
    """Wait for the GPU."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def step(torch: Any, settings: Settings, device: str, rank: int, world: int, say: Say) -> None:
    """One optimizer step of DDP over the adapters, each rank with a text of its own.

    Said: how far gradients and weights of the ranks lie apart (0), how far the shared gradient is from the mean of the
    ranks' own (as a share of its size), and how far this rank's own was from it (else nothing was shared at all).
    """
    from contextlib import nullcontext

    from envforge.verify.policy import SafeCollator
    from envforge.verify.stacks.hf import HfStack
    from envforge.verify.texts import SAMPLES, first_sentence

    say("load")
    torch.manual_seed(settings.seed)  # the same adapters everywhere; DDP sends rank 0's out in any case
    stack = HfStack(settings)
    policy, precision = stack.policy(), stack.precision()
    model = stack.training_model(policy).to(device)
    sample = first_sentence(SAMPLES[rank % len(SAMPLES)])
    batch = {name: value.to(device) for name, value in SafeCollator(stack.tokenizer(), policy)([sample]).items()}
    say("wrap")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=None if device == "cpu" else [device])
    moving = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = "cpu" if device == "cpu" else "cuda"
    found = []
    for shared in (False, True):
        say("step together" if shared else "step alone")
        for parameter in moving:
            parameter.grad = None
        mixed = nullcontext() if precision.name == "fp32" else torch.autocast(kind, dtype=precision.dtype)
        with nullcontext() if shared else wrapped.no_sync():
            with mixed:
                loss = wrapped(**batch).loss
            loss.backward()
        found.append(torch.cat([p.grad.detach().float().flatten() for p in moving if p.grad is not None]))
    own, shared_gradient = found
    mean = own.clone()
    torch.distributed.all_reduce(mean)
    mean /= world
    size = float(mean.norm()) or 1.0
    torch.optim.AdamW(moving, lr=policy.learning_rate).step()
    weights = torch.cat([parameter.detach().float().flatten() for parameter in moving])
    say(
        "step done",
        loss=round(float(loss.detach()), 5),
        gradient_spread=spread(torch, shared_gradient),
        gradient_error=float((shared_gradient - mean).norm()) / size,
        own_difference=float((own - mean).norm()) / size,
        weight_spread=spread(torch, weights),
    )


def spread(torch: Any, tensor: Any) -> float:
    """Largest difference of any element between the ranks."""
    highest, lowest = tensor.clone(), tensor.clone()
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(lowest, op=torch.distributed.ReduceOp.MIN)
    return float((highest - lowest).max())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
