"""The frozen answer of `resolve` and its canonical JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from envforge.errors import DataError

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a pin has its value: one sentence and where that is known from."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Warning_:
    """Something that the user should know though the plan stands. `id` is stable (see the documentation's list)."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Target:
    """What the plan was made for: enough to render, build, check a driver floor and choose architectures.

    `sm`: every compute capability in the fleet, ascending ("7.0", "9.0"); empty for a CPU plan.
    `driver`: the lowest driver of the fleet; `driver_floor`: the lowest driver that this plan runs on.
    """

    arch: str
    glibc: str | None
    driver: str | None
    driver_floor: str | None
    sm: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    memory_mib: int | None = None  # smallest GPU


@dataclass(frozen=True, slots=True)
class Plan:
    """One environment, frozen.

    requests: the PEP 508 lines as asked, sorted. pins: exact versions of the matrix packages of the answer, without
    local part. constraints: further PEP 508 lines for the closure, from rules on packages outside the matrix
    (`pyarrow<26`). as_of: ISO date of coherence or None. undated: packages that the closure must not cut off at that
    date (torch, its own needs, and every pin newer than the date). extras: `{"transformers": ("torch",)}`.
    source_only: pins that have no wheel and are compiled, with what they need. left_out: packages that something
    declares but that must not come in (torchvision beside a CPU torch where only its CUDA build is to be had: it fails
    at import).
    """

    python: str
    variant: str
    tier: str
    pins: dict[str, str]
    requests: tuple[str, ...]
    target: Target
    reasons: dict[str, tuple[Reason, ...]] = field(default_factory=dict)
    warnings: tuple[Warning_, ...] = ()
    constraints: tuple[str, ...] = ()
    extras: dict[str, tuple[str, ...]] = field(default_factory=dict)
    as_of: str | None = None
    undated: tuple[str, ...] = ()
    source_only: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    cuda: str | None = None  # torch's CUDA, "12.6": the one value behind index, base, toolkit and post-build check
    matrix_hash: str = ""
    matrix_as_of: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data in the canonical order (sorted keys everywhere)."""
        return {"schema": SCHEMA, **json.loads(json.dumps(asdict(self)))}

    def dumps(self) -> str:
        """Canonical text: equal plans give equal bytes."""
        return json.dumps(self.to_json(), sort_keys=True, indent=1, ensure_ascii=False) + "\n"

    def hash(self) -> str:
        """Hex SHA-256 of the canonical text."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()


def load_plan(text: str, where: str = "plan.json") -> Plan:
    """The inverse of `Plan.dumps`.

    Raises:
        DataError: not a plan of this schema.
    """
    try:
        data = json.loads(text)
        if data.pop("schema") != SCHEMA:
            raise ValueError("unknown schema")
        target: dict[str, Any] = data["target"]
        data["target"] = Target(**{**target, "sm": tuple(target["sm"]), "hosts": tuple(target["hosts"])})
        data["reasons"] = {name: tuple(Reason(**row) for row in rows) for name, rows in data["reasons"].items()}
        data["warnings"] = tuple(Warning_(**row) for row in data["warnings"])
        data["extras"] = {name: tuple(extras) for name, extras in data["extras"].items()}
        for key in ("requests", "constraints", "undated", "source_only", "left_out"):
            data[key] = tuple(data.get(key, ()))
        return Plan(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: not an envforge plan ({error})", "make it again with envforge resolve") from error
