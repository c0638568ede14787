"""On which nodes of a Kubernetes cluster a job may run: a plan's needs as conditions on node labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envforge.jobs.model import JobSpec

Term = dict[str, Any]
# Labels of NVIDIA's GPU feature discovery; the driver's are the older names, which every release of it sets.
MAJOR, MINOR, REVISION = (f"nvidia.com/cuda.driver.{part}" for part in ("major", "minor", "rev"))
SM_MAJOR, SM_MINOR = "nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor"
_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}


def node_affinity(spec: JobSpec) -> Term | None:
    """Conditions on the labels of NVIDIA's feature discovery: the plan's driver floor and compute capabilities.

    A node fits when any of the terms fits wholly. A capability stands for the later ones of its major.
    """
    common: list[Term] = []
    plan: Mapping[str, Any] = spec.plan or {}
    arch = _ARCH.get(str((plan.get("target") or {}).get("arch") or ""))
    if arch:
        common.append(_in("kubernetes.io/arch", arch))
    if spec.nodelist:
        common.append(_in("kubernetes.io/hostname", *spec.nodelist.split(",")))
    if spec.exclude:
        common.append({"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(spec.exclude)})
    gpu = spec.gpus_per_node > 0 and spec.variant != "cpu"
    drivers = _driver_terms(spec.driver_floor) if gpu and spec.driver_floor else [[]]
    kinds = _sm_terms(spec.sms) if gpu and spec.sms else [[]]
    terms = [[*common, *driver, *kind] for kind in kinds for driver in drivers]
    terms = [term for term in terms if term]
    if not terms:
        return None
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": term} for term in terms]
        }
    }


def _in(key: str, *values: str) -> Term:
    return {"key": key, "operator": "In", "values": list(values)}


def _at_least(key: str, number: int) -> Term:
    """Labels know greater-than only; a value below zero is no label, and nothing is below zero."""
    if number <= 0:
        return {"key": key, "operator": "Exists"}
    return {"key": key, "operator": "Gt", "values": [str(number - 1)]}


def _driver_terms(floor: str) -> list[list[Term]]:
    """`floor` or newer: a later major, or the same with a later minor, or the same two with a later revision."""
    major, minor, revision = ([int(part) for part in floor.split(".")] + [0, 0])[:3]
    terms = [[_at_least(MAJOR, major + 1)], [_in(MAJOR, str(major)), _at_least(MINOR, minor + (revision > 0))]]
    if revision:
        same = [str(minor), f"{minor:02d}"] if minor < 10 else [str(minor)]
        terms.append([_in(MAJOR, str(major)), _in(MINOR, *same), _at_least(REVISION, revision)])
    return terms


def _sm_terms(sms: tuple[str, ...]) -> list[list[Term]]:
    lowest: dict[int, int] = {}
    for sm in sms:
        major, minor = (int(part) for part in sm.split("."))
        lowest[major] = min(minor, lowest.get(major, minor))
    whole = [str(major) for major, minor in sorted(lowest.items()) if not minor]
    parts = [[_in(SM_MAJOR, str(m)), _at_least(SM_MINOR, minor)] for m, minor in sorted(lowest.items()) if minor]
    return [*([[_in(SM_MAJOR, *whole)]] if whole else []), *parts]
