"""What detection finds out about one machine, and its JSON form (schema 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 1
FactSource = Literal["nvml", "nvidia-smi", "proc", "sysfs", "override", "recorded", "none"]

# A record: name of a record file -> its text. Every source of detection ends up as one, so that one parser serves all.
Record = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that holds memory of a GPU; `name` and `memory_mib` are None where the driver does not tell."""

    pid: int
    name: str | None = None
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU that answers. `sm` is the compute capability ("8.6"); `vgpu` marks a slice that a hypervisor gave."""

    index: int
    name: str | None = None
    sm: str | None = None
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    mig: bool = False
    vgpu: bool = False
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """A container engine's client; `version` is the server's and None when the server does not answer."""

    name: str
    version: str | None
    answers: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps a GPU from working. `id` is stable (docs/detect.md lists them)."""

    id: str
    text: str
    fix: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One machine. `source` says where `driver` was read; None everywhere means "not told", never "absent"."""

    source: FactSource = "none"
    driver: str | None = None
    cuda_max: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    os: str | None = None
    glibc: str | None = None
    arch: str | None = None
    python: str | None = None
    engine: Engine | None = None
    problems: tuple[Problem, ...] = ()
    wsl: bool = False
    container: bool = False
    slurm: bool = False
    memory_mib: int | None = None


def to_json(facts: HostFacts) -> dict[str, Any]:
    """Plain data in sorted key order; equal facts give equal data. `resolver.hosts.parse_host` reads it back."""
    engine = facts.engine
    return {
        "arch": facts.arch,
        "container": facts.container,
        "cuda_max": facts.cuda_max,
        "driver": facts.driver,
        "engine": {"answers": engine.answers, "name": engine.name, "version": engine.version} if engine else None,
        "glibc": facts.glibc,
        "gpus": [
            {
                "index": gpu.index,
                "memory_mib": gpu.memory_mib,
                "memory_used_mib": gpu.memory_used_mib,
                "mig": gpu.mig,
                "name": gpu.name,
                "processes": [
                    {"memory_mib": process.memory_mib, "name": process.name, "pid": process.pid}
                    for process in gpu.processes
                ],
                "sm": gpu.sm,
                "vgpu": gpu.vgpu,
            }
            for gpu in facts.gpus
        ],
        "memory_mib": facts.memory_mib,
        "os": facts.os,
        "problems": [{"fix": row.fix, "id": row.id, "text": row.text} for row in facts.problems],
        "python": facts.python,
        "schema": SCHEMA,
        "slurm": facts.slurm,
        "source": facts.source,
        "wsl": facts.wsl,
    }
