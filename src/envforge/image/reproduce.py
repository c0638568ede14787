"""The same image twice: times are all that differs between two builds of one lock, so they are taken out afterwards.

Builders differ in what they can do about time (BuildKit rewrites it since version 0.13, older ones and the classic
builder do not), so it is done here, the same for every engine: the image is saved, every layer above the base is
written again with each time set to SOURCE_DATE_EPOCH, the history too, and it is loaded in place of what was built.
The base's own layers stay as they are.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from envforge.errors import EngineError
from envforge.image import oci
from envforge.image.engines import ContainerEngine, ImageInfo
from envforge.image.values import Event, Progress, silent

# What builders write of themselves into the configuration; none of it matters to whoever runs the image.
_OF_THE_BUILD = ("container", "container_config", "docker_version", "moby.buildkit.buildinfo.v1")


def reproduced(
    engine: ContainerEngine, image: ImageInfo, base: str, epoch: int, progress: Progress = silent
) -> ImageInfo:
    """The image with every time in its own layers and history set to `epoch`; the one that was given is gone.

    Args:
        base: reference or id of the base in the engine; its layers are not touched.
    """
    progress(Event("stage", "taking the times out"))
    with tempfile.TemporaryDirectory(prefix="envforge-times-") as folder:
        scratch = Path(folder)
        below = _saved(engine, base, scratch / "base")
        layout = _saved(engine, image.id, scratch / "image")
        blobs = layout / "blobs" / "sha256"
        entry = json.loads((layout / "manifest.json").read_text())[0]
        config = json.loads((layout / entry["Config"]).read_text())
        kept = len(_layers(below))
        layers = [
            path if i < kept else _rewritten(blobs, blobs / path.name, epoch) for i, path in enumerate(_layers(layout))
        ]
        text = json.dumps(_timeless(config, layers, epoch), separators=(",", ":"), sort_keys=True).encode()
        digest = hashlib.sha256(text).hexdigest()
        (blobs / digest).write_bytes(text)
        row: dict[str, Any] = {"Config": f"blobs/sha256/{digest}", "RepoTags": None}
        row["Layers"] = [f"blobs/sha256/{layer.name}" for layer in layers]
        (layout / "manifest.json").write_text(json.dumps([row]))
        (layout / "index.json").unlink()  # names the image of before
        wanted = {digest, *(layer.name for layer in layers)}
        for blob in blobs.iterdir():
            if blob.name not in wanted:
                blob.unlink()
        oci.to_archive(layout, scratch / "new.tar")
        engine.load(scratch / "new.tar")
    found = engine.inspect(f"sha256:{digest}")
    if found is None:
        raise EngineError("the engine loaded an image and does not have it", "look at the engine's log")
    if found.id != image.id:
        engine.remove(image.id)
    return found


def _saved(engine: ContainerEngine, reference: str, folder: Path) -> Path:
    image = engine.inspect(reference)
    if image is None:
        raise EngineError(f"the image {reference} vanished while it was worked on", "build again")
    archive = folder.with_suffix(".tar")
    engine.save(image, archive)
    oci.to_layout(archive, folder, "envforge-build:times")
    archive.unlink()
    return folder


def _layers(layout: Path) -> list[Path]:
    return [layout / name for name in json.loads((layout / "manifest.json").read_text())[0]["Layers"]]


def _rewritten(blobs: Path, layer: Path, epoch: int) -> Path:
    """The layer with all times at `epoch`, under its new digest. Order, owners and modes stay."""
    fresh = blobs / ".fresh"
    with tarfile.open(layer) as old, tarfile.open(fresh, "w", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            changed = copy.copy(member)
            changed.mtime = epoch
            changed.pax_headers = {
                key: value for key, value in member.pax_headers.items() if key not in ("mtime", "atime", "ctime")
            }
            new.addfile(changed, old.extractfile(member) if member.isreg() else None)
    with fresh.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    target = blobs / digest.hexdigest()
    fresh.replace(target)
    return target


def _timeless(config: dict[str, Any], layers: list[Path], epoch: int) -> dict[str, Any]:
    moment = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = {key: value for key, value in config.items() if key not in _OF_THE_BUILD}
    # The classic builder's steps are images of their own, and it notes the last one's id.
    inner = found.get("config") or {}
    found["config"] = {key: value for key, value in inner.items() if key not in ("Image", "Hostname")}
    found["created"] = moment
    found["history"] = [{**row, "created": moment} for row in found.get("history") or ()]
    found["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{layer.name}" for layer in layers]}
    return found
