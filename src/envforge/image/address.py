"""The content address: what makes two images the same. Equal address, nothing to build."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.image.render import TEMPLATES, torch_version
from envforge.image.values import BaseInfo, LockLike
from envforge.resolver.plan import Plan

if TYPE_CHECKING:
    from envforge.spec import Spec

VERIFY = Path(__file__).parent.parent / "verify"
_SHORT = 12


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def template_files() -> tuple[Path, ...]:
    """The templates that end up in an image, sorted."""
    scripts = sorted(p for p in (TEMPLATES / "image").iterdir() if p.suffix in (".sh", ".py", ".txt"))
    return (TEMPLATES / "Dockerfile.j2", *scripts)


def verify_files() -> tuple[Path, ...]:
    """The files of the proof that are packed into every image, sorted; no bytecode."""
    return tuple(sorted(p for p in VERIFY.rglob("*") if p.is_file() and "__pycache__" not in p.parts))


def content_address(
    plan: Plan, lock: LockLike, spec: Spec, base: BaseInfo, kind: str, system: Mapping[str, str] | None = None
) -> str:
    """Hex SHA-256 over lock, base digest, templates, the packed proof, the spec's own additions and the target.

    kind: `image` or `venv`. system: versions of the system packages, where they are known.
    The plan's reasons and warnings do not count: they change no byte of the environment.
    """
    folder = spec.folder or Path()
    parts = {
        "kind": kind,
        "lock": lock.hash,
        "base": base.digest or base.ref,
        "system": [f"{n}={v}" for n, v in sorted(system.items())] if system else sorted(spec.system_packages),
        "templates": {p.name: sha256(p.read_bytes()) for p in template_files()},
        "verify": {str(p.relative_to(VERIFY)): sha256(p.read_bytes()) for p in verify_files()},
        "env": spec.env,
        "files": {target: sha256((folder / source).read_bytes()) for target, source in spec.files.items()},
        "stack": [spec.name, spec.verify.stack, spec.verify.steps, spec.verify.max_length, spec.verify.prompt],
        "verify_options": [spec.verify.options, spec.remote_code],
        "target": [plan.target.arch, plan.python, plan.variant, list(plan.target.sm), plan.target.driver_floor],
        "source_only": sorted(plan.source_only),
    }
    return sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode())


def image_tag(plan: Plan, lock: LockLike, spec: Spec, address: str) -> str:
    """`envforge/STACK:TORCH-VARIANT-HASH`; the local part of torch's version is the variant: not said twice."""
    torch = torch_version(plan, lock).split("+", 1)[0]
    return f"envforge/{spec.name}:{torch}-{plan.variant}-{address[:_SHORT]}"
