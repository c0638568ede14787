"""An image that somebody else built, a CI for example: is it what a plan says? Then it counts as built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from envforge.errors import DataError, NoError, OutsideError
from envforge.image.engines import ContainerEngine, ImageInfo
from envforge.image.library import OURS, plan_of
from envforge.image.proofs import keep_proof, known_proof
from envforge.image.registry import Registry, RegistryError, parse_reference
from envforge.image.values import (
    LABEL_ADDRESS,
    LABEL_LOCK_HASH,
    LABEL_STACK,
    LABEL_TORCH,
    BuildResult,
    Event,
    Progress,
    silent,
)
from envforge.resolver.plan import Plan

# Run by the image's own Python. Its answer is the last line: what an image prints at its start does not matter.
_INSIDE = """
import importlib.metadata as m, json, sys
found = {}
for d in m.distributions():
    if d.metadata["Name"]:
        found.setdefault(d.metadata["Name"].lower().replace("_", "-").replace(".", "-"), d.version)
print("\\n" + json.dumps({"python": "%d.%d" % sys.version_info[:2], "packages": found}))
"""
_SHELL = 'if command -v python >/dev/null; then exec python -c "$1"; fi; exec python3 -c "$1"'
_TOLD = 12


@dataclass(frozen=True, slots=True)
class Adopted:
    """An image that was looked at and found to be what the plan says."""

    image: ImageInfo
    plan: Plan
    name: str | None
    registry: dict[str, Any] | None
    proof: dict[str, Any] | None = None  # a receipt of exactly this image: kept here, or beside it in its registry

    def result(self, engine: str, reference: str) -> BuildResult:
        """As a build's result, for build.json."""
        return BuildResult(
            engine=engine,
            reference=self.name or reference,
            digest=self.image.id,
            address=self.image.labels.get(LABEL_ADDRESS, ""),
            reused=True,
            seconds=0.0,
            size=self.image.size,
            warnings=() if self.proof else ("adopted: built elsewhere, and not proven here",),
            grade=self.proof["grade"] if self.proof else None,
            proof=self.proof,
            registry=self.registry,
        )


def packages_inside(engine: ContainerEngine, image: ImageInfo) -> tuple[str, dict[str, str]]:
    """The Python version ("3.11") and all installed packages, as the image's own Python names them.

    Raises:
        OutsideError: there is no Python inside, or it does not answer.
    """
    answer = engine.ask(image, ["/bin/sh", "-c", _SHELL, "sh", _INSIDE])
    try:
        data = json.loads(answer.output.rstrip().splitlines()[-1])
        return str(data["python"]), {str(name): str(version) for name, version in data["packages"].items()}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        said = answer.output.strip().splitlines()[-1:] or ["no answer"]
        raise OutsideError(
            f"the Python of the image {image.id} does not tell its packages: {said[0][:200]}",
            "adopt needs an image with python or python3 on its PATH",
            id="no-python-inside",
        ) from error


def differences(plan: Plan, python: str, packages: dict[str, str]) -> list[str]:
    """What an environment has that is not what the plan says, one sentence each."""
    found = []
    if python != plan.python:
        found.append(f"Python is {python}, the plan says {plan.python}")
    for name, version in sorted(plan.pins.items()):
        have = packages.get(name)
        if have is None:
            found.append(f"{name} {version} is not installed")
        elif have.partition("+")[0] != version:
            found.append(f"{name} is {have}, the plan says {version}")
    torch = packages.get("torch", "")
    if "+" in torch and torch.partition("+")[2] != plan.variant:
        found.append(f"torch is built for {torch.partition('+')[2]}, the plan says {plan.variant}")
    return found


def adopt(
    engine: ContainerEngine,
    reference: str,
    plan: Plan | None = None,
    lock_hash: str | None = None,
    progress: Progress = silent,
) -> Adopted:
    """Fetch an image where needed, compare it with the plan, and give it our name where its labels say what it is.

    Args:
        plan: what it shall be; without one, what its own label says.
        lock_hash: of the lock that it shall hold, where that is known.

    Raises:
        NoError: it is not what the plan says; every difference is named.
        DataError: it carries no plan and none was given. RegistryError, OutsideError: it cannot be had or asked.
    """
    image = engine.inspect(reference)
    if image is None:
        image = engine.pull(reference, progress)
    carried = plan_of(image.labels, reference)
    wanted = plan or carried
    if wanted is None:
        raise DataError(f"{reference} carries no plan", "name the project whose plan it shall be: images adopt REF DIR")
    progress(Event("stage", "asking it for its packages"))
    python, packages = packages_inside(engine, image)
    wrong = differences(wanted, python, packages)
    labelled = image.labels.get(LABEL_LOCK_HASH)
    if lock_hash is not None and labelled is not None and labelled != lock_hash:
        wrong.append("it was built from another lock")
    if wrong:
        more = f"\n... and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
        raise NoError(
            f"{reference} is not what the plan says:\n" + "\n".join(wrong[:_TOLD]) + more,
            "build it again from this plan, or make a plan of what it holds",
            id="not-the-plan",
        )
    name = None
    # Only with a plan of its own that agrees: from then on `build` takes it for what its address says.
    if carried is not None and carried.pins == wanted.pins and image.labels.get(LABEL_ADDRESS):
        name = _our_name(image, carried)
        image = engine.tag(image, name)
    proven = known_proof(image, reference)
    if proven is not None:
        keep_proof(proven[0], image.labels[LABEL_ADDRESS], proven[1])
    return Adopted(image, wanted, name, _in_registry(reference, image), proven[0] if proven else None)


def _our_name(image: ImageInfo, plan: Plan) -> str:
    """The name that a build gives. Labels are other people's text: they are held to what a name may be."""
    from envforge.image import quote

    torch = (image.labels.get(LABEL_TORCH) or plan.pins.get("torch", "none")).partition("+")[0]
    address = image.labels[LABEL_ADDRESS]
    return quote.reference(f"{OURS}{image.labels.get(LABEL_STACK) or 'custom'}:{torch}-{plan.variant}-{address[:12]}")


def _in_registry(reference: str, image: ImageInfo) -> dict[str, Any] | None:
    """Where it is in a registry, for build.json; None for a local name, or where the registry does not say the same:
    a tag may have moved on since the image was fetched."""
    from envforge.image.publish import record

    if "/" not in reference or not ("." in reference.split("/")[0] or ":" in reference.split("/")[0]):
        return None
    where = parse_reference(reference)
    try:
        remote = Registry(where.host).find(where)
    except RegistryError:
        return None
    if remote is None or image.id not in (remote.config, remote.digest):
        return None
    return record(remote.reference, remote.digest, pushed=False)
