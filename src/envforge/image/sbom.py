"""What is in an image, as a CycloneDX document: made by the cyclonedx library, the same bytes for the same content.

Two of them: one is packed into the image before it is built (the lock with its hashes, the base, the system packages
that were asked for), so it needs no engine; the other is read off the finished image and stands beside its receipt: all
packages of the base too, and the licences that the wheels declare.
"""

from __future__ import annotations

import datetime
import json
import re
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envforge.image.engines import ContainerEngine, Engine, ImageInfo, container_engine
from envforge.image.split import parse_lock
from envforge.image.values import BaseInfo, LockLike

PLACE = "/opt/envforge/sbom.cdx.json"
FILE = "sbom.cdx.json"
_SPACE = uuid.UUID("c1f9a5d2-6f0e-4a6a-9f51-2f6f8c1f7a10")  # names of our documents; any fixed value does
# Runs inside: Debian's packages, then the licences of the environment's own, one JSON document.
_ASK = """
import importlib.metadata as m, json, subprocess
def debs():
    try:
        form = "${Package}\\t${Version}\\t${Architecture}\\n"
        out = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True)
        return [line.split("\\t") for line in out.stdout.splitlines()]
    except OSError:
        return []
def licence(data):
    said = data.get("License-Expression") or data.get("License") or ""
    kinds = [c.rpartition(" :: ")[2] for c in data.get_all("Classifier") or () if c.startswith("License ::")]
    return said if said and len(said) < 80 and "\\n" not in said else " AND ".join(kinds)
print(json.dumps({"debs": debs(), "licences": {d.name: licence(d.metadata) for d in m.distributions()}}))
"""


def make_sbom(
    name: str,
    lock: LockLike,
    base: BaseInfo,
    address: str,
    *,
    debs: Mapping[str, str],
    licences: Mapping[str, str] | None = None,
    epoch: int | None = None,
) -> str:
    """The document (CycloneDX 1.5, JSON).

    Args:
        name: of the stack. debs: Debian packages, name -> version.
        licences: what packages declare, by normalised name.
        epoch: its date; the date is part of the format, and 1970 stands for none.
    """
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot5
    from packageurl import PackageURL

    bom = Bom(serial_number=uuid.uuid5(_SPACE, address))
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(epoch or 0, datetime.timezone.utc)
    image = Component(name=name, version=address[:12], type=ComponentType.CONTAINER, bom_ref="image")
    bom.metadata.component = image
    parts = [Component(name=base.ref, version=base.digest or None, type=ComponentType.CONTAINER, bom_ref="base")]
    for row in parse_lock(lock.requirements):
        url = PackageURL("pypi", name=row.name, version=row.version)
        parts.append(
            Component(
                name=row.name,
                version=row.version,
                purl=url,
                bom_ref=str(url),
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in row.hashes],
                licenses=_licences((licences or {}).get(row.name, "")),
            )
        )
    system = re.match(r"[a-z]+", base.os or "debian")
    for package, version in sorted(debs.items()):
        url = PackageURL("deb", namespace=system[0] if system else "debian", name=package, version=version)
        parts.append(Component(name=package, version=version, purl=url, bom_ref=str(url)))
    for part in parts:
        bom.components.add(part)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bom.register_dependency(image, parts)
        text: str = JsonV1Dot5(bom).output_as_string(indent=1)
    return text + "\n"


def write_sbom(
    path: Path,
    name: str,
    lock: LockLike,
    base: BaseInfo,
    address: str,
    engine: Engine,
    image: ImageInfo,
    epoch: int | None,
) -> Path | None:
    """The document of a finished image in `path`; what is there stays. None for folders of the venv engine.

    Raises:
        DiskFullError, UsageError: it cannot be written.
    """
    from envforge.files import write_atomic

    if engine.name == "venv":
        return None
    if not path.is_file():
        debs, licences = read_inside(container_engine(engine), image)
        write_atomic(path, make_sbom(name, lock, base, address, debs=debs, licences=licences, epoch=epoch))
    return path


def _licences(text: str) -> list[Any]:
    from cyclonedx.model.license import DisjunctiveLicense

    return [DisjunctiveLicense(name=text)] if text else []


def read_inside(engine: ContainerEngine, image: ImageInfo) -> tuple[dict[str, str], dict[str, str]]:
    """Debian packages of a finished image, and the licences that its Python packages declare, by normalised name.

    Both are empty where the image does not answer: a document with less in it is no reason to fail a build.
    """
    done = engine.ask(image, ["/opt/envforge/env/bin/python", "-I", "-c", _ASK])
    try:
        found = json.loads(done.output.strip().splitlines()[-1])
        debs = {str(row[0]): str(row[1]) for row in found["debs"]}
        licences = {re.sub(r"[-_.]+", "-", name).lower(): str(text) for name, text in found["licences"].items()}
    except (ValueError, KeyError, TypeError, IndexError):
        return {}, {}
    return debs, licences
