"""What a run was asked to do, as plain data that travels to the stage processes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROMPT = "What is the capital of France?"

# Seconds per layer. A hang is a finding; these are far above what a healthy small model needs.
LIMITS = {
    "environment": 600.0,
    "data": 600.0,
    "chat": 1800.0,
    "training": 3600.0,
    "distributed": 600.0,
    "effect": 1800.0,
}


@dataclass
class Settings:
    """All options of one run. Paths are strings (JSON); `workdir` is a scratch folder that the run owns.

    device: "cuda" or "cpu", what the proof has to run on. `model` is a folder; `model_id` what the user named.
    `expect` is a word that the base model's answer must hold (only for models that are known to know it).
    """

    workdir: str = ""
    model: str = ""
    model_id: str = ""
    revision: str | None = None
    trust_remote_code: bool = False
    stack: str = "transformers"
    device: str = "cpu"
    grade: str = "full"
    plan: dict[str, Any] | None = None
    plan_hash: str | None = None
    lock: str | None = None
    lock_hash: str | None = None
    data: str | None = None
    prompt: str = PROMPT
    expect: str = ""
    max_new_tokens: int = 32
    steps: int = 8
    max_length: int = 1024
    batch_size: int = 1
    accumulation: int | None = None  # None: 8 on a GPU, 2 on the CPU
    learning_rate: float = 2e-4
    max_grad_norm: float = 1.0
    precision: str = "auto"
    seed: int = 3407
    four_bit: bool = True
    shm: str = "/dev/shm"
    infiniband: str = "/sys/class/infiniband"
    processes: int = 1  # ranks of the distributed layer; below 2 it is left out
    launch_blocking: bool = False
    targets: dict[str, str] = field(default_factory=dict)  # layer (or "ranks") -> "module:function", of one's own
    limits: dict[str, float] = field(default_factory=lambda: dict(LIMITS))
    memory_limit_mib: int | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one optimizer step."""
        if self.accumulation is not None:
            return self.accumulation
        return 8 if self.device == "cuda" else 2

    @property
    def gpu_plan(self) -> bool:
        """Whether the plan is for a GPU."""
        return self.plan is not None and str(self.plan.get("variant", "cpu")) != "cpu"

    def dump(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read what `dump` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def read_plan(path: Path) -> tuple[dict[str, Any], str]:
    """-> the plan and the SHA-256 of its canonical text (sorted keys, one space of indent), as the resolver hashes it.

    Raises:
        ValueError: not a plan.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a plan ({error})") from error
    if not isinstance(plan, dict) or "pins" not in plan or "variant" not in plan:
        raise ValueError(f"{path}: not an envforge plan (no pins or no variant in it)")
    text = json.dumps(plan, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    return plan, hashlib.sha256(text.encode()).hexdigest()
