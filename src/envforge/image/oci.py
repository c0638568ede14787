"""An image as a folder that is both an OCI layout and, packed again, an archive that every engine's `load` reads.

Engines that write docker's archive format are many, those that read OCI layouts fewer (docker since version 25). The
folder's blobs are named by their SHA-256, so whoever holds the folder can check it without any engine.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import IO, Any

from envforge.errors import DataError

_LAYOUT = {"imageLayoutVersion": "1.0.0"}
_KIND = "application/vnd.oci.image."


def to_layout(archive: Path, folder: Path, name: str) -> str:
    """A docker archive of one image -> `folder` (made; must not exist). Returns the image's id (`sha256:...`).

    name: what the image is called when the folder is loaded.

    Raises:
        DataError: no such archive.
    """
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            (row,) = json.load(_member(tar, "manifest.json"))
            config = _blob(_member(tar, row["Config"]), blobs)
            layers = [_blob(_member(tar, layer), blobs) for layer in row["Layers"]]
    except (tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{archive} is no archive of one image ({error})", "save the image again") from error
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": f"{_KIND}manifest.v1+json",
        "config": {"mediaType": f"{_KIND}config.v1+json", **config},
        "layers": [{"mediaType": f"{_KIND}layer.v1.tar", **layer} for layer in layers],
    }
    text = json.dumps(manifest, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest()
    (blobs / digest).write_bytes(text)
    entry = {"mediaType": manifest["mediaType"], "digest": f"sha256:{digest}", "size": len(text)}
    entry["annotations"] = {"org.opencontainers.image.ref.name": name}
    own = {
        "Config": _path(config),
        "RepoTags": [name],
        "Layers": [_path(layer) for layer in layers],
    }
    (folder / "oci-layout").write_text(json.dumps(_LAYOUT))
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "manifest.json").write_text(json.dumps([own]))
    return str(config["digest"])


def to_archive(folder: Path, archive: Path) -> None:
    """The folder of `to_layout` as an archive for an engine's `load`.

    Raises:
        DataError: a blob is not what its name says.
    """
    for blob in sorted((folder / "blobs" / "sha256").iterdir()):
        with blob.open("rb") as stream:
            if _digest(stream) != blob.name:
                raise DataError(f"{blob} is damaged", "make the bundle again: what is whole is kept")
    with tarfile.open(archive, "w") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                tar.add(path, str(path.relative_to(folder)), recursive=False)


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    stream = tar.extractfile(name)
    if stream is None:
        raise ValueError(f"{name} is not a file")
    return stream


def _blob(stream: IO[bytes], folder: Path) -> dict[str, Any]:
    """Copy into the folder under its own digest."""
    fresh = folder / ".fresh"
    digest = hashlib.sha256()
    with fresh.open("wb") as out:
        while block := stream.read(1 << 20):
            digest.update(block)
            out.write(block)
    size = fresh.stat().st_size
    fresh.replace(folder / digest.hexdigest())
    return {"digest": f"sha256:{digest.hexdigest()}", "size": size}


def _path(blob: dict[str, Any]) -> str:
    return f"blobs/sha256/{str(blob['digest']).removeprefix('sha256:')}"


def _digest(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
