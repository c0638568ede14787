"""The receipt of an image's proof beside it in the registry, so that whoever fetches it sees that it was proven.

A receipt there says what its image is by digest and content address; one of another image is none of its. Who may push
the image may push receipts too: it is that registry's word, no signature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envforge.errors import NoError, OutsideError
from envforge.files import write_atomic
from envforge.image.artifacts import attach, documents
from envforge.image.engines import ImageInfo
from envforge.image.registry import HUB, Registry, RegistryError, Remote, parse_reference
from envforge.image.state import folder_of, state_root
from envforge.image.values import LABEL_ADDRESS

KIND = "application/vnd.envforge.receipt.v1+json"
GRADES = ("full", "static")  # best first
HERE = "this machine"


def put_proof(client: Registry, remote: Remote, receipt: Mapping[str, Any]) -> str:
    """Put a receipt beside its image; returns the digest of the artifact.

    What only this machine understands (the folder of the model) stays here.

    Raises:
        RegistryError: no answer, or a refusal.
    """
    own = {"digest": remote.config, "address": remote.labels.get(LABEL_ADDRESS, "")}
    data = json.dumps({**receipt, "image": own}, sort_keys=True, indent=1, ensure_ascii=False).encode()
    notes = {"envforge.grade": str(receipt.get("grade")), "envforge.proven": str(receipt.get("started"))}
    return attach(client, remote, KIND, f"receipt-{receipt.get('grade')}.json", data, notes)


def put_earned(reference: str, receipt: Mapping[str, Any]) -> tuple[Remote, str]:
    """Put a receipt that was earned elsewhere (a job on a GPU node) beside its image; -> the image, and the artifact.

    Raises:
        NoError: it did not pass, or is of another image. OutsideError: there is no such image. RegistryError: no
        answer, or a refusal. DataError: no reference.
    """
    where = parse_reference(reference)
    client = Registry(where.host)
    remote = client.find(where)
    if remote is None:
        raise OutsideError(f"there is no image {reference} in its registry", "push it first: envforge build --push")
    if receipt.get("passed") is not True or receipt.get("grade") not in GRADES:
        raise NoError("the receipt did not pass", "envforge verify --receipt FILE explains it", id="not-proven")
    image = receipt.get("image")
    proven = receipt.get("image_digest") or (image.get("digest") if isinstance(image, dict) else None)
    if proven not in (remote.config, remote.digest):
        raise NoError(
            f"the receipt is of {proven or 'an environment without a digest'}, and {reference} is {remote.digest} "
            f"(image {remote.config})",
            "name the image that was proven; jobs tell it to their proof when it is known (--digest)",
            id="another-image",
        )
    return remote, put_proof(client, remote, receipt)


def get_proof(client: Registry, remote: Remote) -> dict[str, Any] | None:
    """The best receipt beside an image that is this image's and passed; None where there is none.

    Raises:
        RegistryError: no answer, or a refusal.
    """
    found = []
    for data in documents(client, remote, KIND):
        try:
            receipt = json.loads(data)
        except ValueError:
            continue
        if proves(receipt, (remote.config, remote.digest), remote.labels.get(LABEL_ADDRESS, "")):
            found.append(receipt)
    return min(reversed(found), key=lambda receipt: GRADES.index(receipt["grade"]), default=None)


def proves(receipt: object, digests: tuple[str, ...], address: str) -> bool:
    """Whether it is a receipt that passed, of the image with one of these digests and this content address."""
    if not isinstance(receipt, dict) or receipt.get("passed") is not True or receipt.get("grade") not in GRADES:
        return False
    image = receipt.get("image")
    return isinstance(image, dict) and image.get("digest") in digests and image.get("address") == address


def keep_proof(receipt: Mapping[str, Any], address: str, source: str, root: Path | None = None) -> Path:
    """Keep a receipt that was fetched from `source` where those of builds lie, unless one of that grade is there."""
    folder = folder_of(root or state_root(), address)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"receipt-{receipt['grade']}.json"
    if not path.is_file():
        fetched = {**receipt, "image": {**receipt["image"], "from": source}}
        write_atomic(path, json.dumps(fetched, indent=1, ensure_ascii=False) + "\n")
    return path


def known_proof(image: ImageInfo, reference: str = "") -> tuple[dict[str, Any], str] | None:
    """The best receipt of an image, and whose word it is: kept on this machine, else beside it in the registry that
    the reference names. A registry that does not answer says nothing."""
    address = image.labels.get(LABEL_ADDRESS, "")
    if not address:
        return None
    for grade in GRADES:
        path = folder_of(state_root(), address) / f"receipt-{grade}.json"
        try:
            receipt = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if proves(receipt, (image.id,), address):
            return receipt, str(receipt["image"].get("from") or HERE)
    where = parse_reference(reference) if reference and not reference.startswith("sha256:") else None
    if where is None or (where.host == HUB and not reference.startswith(f"{HUB}/")):  # else a name of this machine
        return None
    try:
        client = Registry(where.host)
        remote = client.find(where)
        if remote is None or image.id not in (remote.config, remote.digest):
            return None
        found = get_proof(client, remote)
    except RegistryError:
        return None
    return (found, where.host) if found is not None else None
