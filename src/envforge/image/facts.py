"""What the preflight inside an image holds a node against: from the plan, and from the matrix's row of its torch."""

from __future__ import annotations

from typing import Any

from envforge.matrix.load import load_matrix
from envforge.resolver.plan import Plan


def preflight_facts(plan: Plan, address: str) -> dict[str, Any]:
    """The content of preflight.json.

    `sm` and `ptx`: the GPU code that torch has (empty where the matrix does not know this build); `planned_sm`: the
    compute capabilities of the fleet that the plan was made for, which every other package was checked against.
    """
    minor = ".".join(plan.pins.get("torch", "").split(".")[:2])
    row = next(
        (
            build
            for build in load_matrix().torch_builds
            if (build.torch, build.variant, build.arch) == (minor, plan.variant, plan.target.arch)
        ),
        None,
    )
    return {
        "schema": 1,
        "variant": plan.variant,
        "tier": plan.tier,
        "driver_floor": plan.target.driver_floor,
        "sm": list(row.sm) if row else [],
        "ptx": list(row.ptx) if row else [],
        "planned_sm": list(plan.target.sm),
        "address": address,
    }
