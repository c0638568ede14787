"""Documents that travel with an image in its registry: artifacts that refer to it (OCI distribution 1.1, referrers).

Registries that know no referrers keep the same list under a tag that is the image's digest: what the specification
names as the way for clients, so that other tools (oras, cosign's tree) show them too.
https://github.com/opencontainers/distribution-spec/blob/main/spec.md#listing-referrers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from envforge.image.registry import Reference, Registry, RegistryError, Remote, digest_of

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
_TITLE = "org.opencontainers.image.title"
_BYTES = "application/octet-stream"
_MOST = 50  # artifacts of one kind that are looked at


def attach(
    client: Registry, image: Remote, kind: str, name: str, data: bytes, notes: Mapping[str, str] | None = None
) -> str:
    """Put a document beside an image; where the same is there already, nothing is pushed.

    Args:
        kind: its media type. name: its file name. notes: annotations, to be read without fetching it.

    Returns:
        The digest of the artifact's manifest.

    Raises:
        RegistryError: no answer, or a refusal; some registries take no artifacts.
    """
    where = image.reference
    text = {_TITLE: name, **(notes or {})}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": kind,
        "config": _described(b"{}", EMPTY),
        "layers": [{**_described(data, kind), "annotations": {_TITLE: name}}],
        "subject": {"mediaType": image.media, "digest": image.digest, "size": image.length},
        "annotations": text,
    }
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    row = {**_described(body, MANIFEST), "artifactType": kind, "annotations": text}
    if any(known.get("digest") == row["digest"] for known in referrers(client, image)):
        return str(row["digest"])
    for blob in (b"{}", data):
        _upload(client, where, blob)
    answer = client.ask("PUT", where, f"manifests/{row['digest']}", data=body, kind=MANIFEST)
    if answer is None:
        raise RegistryError(f"the registry {where.host} has no place for {where.path}")
    if "OCI-Subject" not in answer.headers:
        rows = [*_tagged(client, image), row]
        index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": rows}).encode()
        client.ask("PUT", where, f"manifests/{_tag(image.digest)}", data=index, kind=INDEX)
    return str(row["digest"])


def referrers(client: Registry, image: Remote) -> list[dict[str, Any]]:
    """What refers to an image, by its rows in the registry's list; empty where nothing does.

    Raises:
        RegistryError: no answer, or a refusal.
    """
    try:
        answer = client.ask("GET", image.reference, f"referrers/{image.digest}")
    except RegistryError as error:
        if error.denied:
            raise
        answer = None  # a registry of before, that does not even say "not found"
    found = _rows(answer)
    return found if found is not None else _tagged(client, image)


def documents(client: Registry, image: Remote, kind: str) -> list[bytes]:
    """The documents of one kind beside an image, each compared with its digest; what is broken is left out.

    Raises:
        RegistryError: no answer, or a refusal.
    """
    found = []
    rows = [row for row in referrers(client, image) if row.get("artifactType") == kind]
    for row in rows[-_MOST:]:
        manifest = _object(client.ask("GET", image.reference, f"manifests/{row.get('digest')}"))
        try:
            digest = str(manifest["layers"][0]["digest"])
        except (KeyError, IndexError, TypeError):
            continue
        blob = client.ask("GET", image.reference, f"blobs/{digest}")
        if blob is not None and digest == digest_of(blob.content):
            found.append(blob.content)
    return found


def _described(data: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}


def _tag(digest: str) -> str:
    return digest.replace(":", "-")


def _tagged(client: Registry, image: Remote) -> list[dict[str, Any]]:
    return _rows(client.ask("GET", image.reference, f"manifests/{_tag(image.digest)}")) or []


def _object(answer: Any) -> dict[str, Any]:
    try:
        data = answer.json() if answer is not None else {}
    except ValueError:
        data = {}
    return data if isinstance(data, dict) else {}


def _rows(answer: Any) -> list[dict[str, Any]] | None:
    rows = _object(answer).get("manifests")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else None


def _upload(client: Registry, where: Reference, data: bytes) -> None:
    digest = digest_of(data)
    if client.ask("HEAD", where, f"blobs/{digest}") is not None:
        return
    begun = client.ask("POST", replace(where, digest=None), "blobs/uploads/", data=b"")
    place = begun.headers.get("Location", "") if begun is not None else ""
    if not place:
        raise RegistryError(f"the registry {where.host} gave no place to upload to")
    mark = "&" if urlsplit(place).query else "?"
    client.ask("PUT", where, f"{place}{mark}digest={digest.replace(':', '%3A')}", data=data, kind=_BYTES)
