"""What a host is, and what a fleet of hosts allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class HostGpu:
    """One GPU of a host: product name (may be None when only its capability is known), capability "8.6", MiB."""

    name: str | None
    sm: str | None
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """One machine's facts as `detect --json` prints them; `count` such machines in a fleet."""

    name: str
    driver: str | None
    gpus: tuple[HostGpu, ...] = ()
    cuda_max: str | None = None
    glibc: str | None = None
    arch: str = "x86_64"
    os: str | None = None
    python: str | None = None
    count: int = 1
    labels: dict[str, str] = field(default_factory=dict)
    source: str = "override"
