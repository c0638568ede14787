"""The built image in the form that a cluster's container tool takes: an OCI archive, a squashfs, a SIF.

Converted, never built a second time. A file is named by the image's id, so it is written once per folder, by whoever
comes first; the others wait and find it. It appears under its name only when it is whole.

What a squashfs has to hold besides the file system, so that `enroot start` and pyxis find environment and entrypoint,
is what `enroot import` puts there: https://github.com/NVIDIA/enroot/blob/master/doc/image-format.md
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envforge.errors import DiskFullError, OutsideError, UsageError
from envforge.files import no_space
from envforge.image.engines import ContainerEngine, ImageInfo
from envforge.image.engines.process import stream
from envforge.image.values import LABEL_STACK, LABEL_TORCH, Event, Progress, silent

FORMATS = {"oci-archive": ".oci.tar", "sqsh": ".sqsh", "sif": ".sif"}
# tool -> Debian package
_TOOLS = {"skopeo": "skopeo", "umoci": "umoci", "mksquashfs": "squashfs-tools"}
_NEEDS = {"oci-archive": ("skopeo",), "sqsh": ("skopeo", "umoci", "mksquashfs"), "sif": ()}
_ID = 16  # hex digits of the image's id in a file's name


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished file; `reused`: it was there."""

    path: Path
    reused: bool
    size: int


def export(engine: ContainerEngine, image: ImageInfo, kind: str, folder: Path, progress: Progress = silent) -> Exported:
    """Convert one image into a file of `folder`.

    Raises:
        UsageError: no such format, or the folder cannot be used. OutsideError: a tool is missing or failed; nothing
        half-written stays. DiskFullError: no room in the folder or in TMPDIR, where the conversion works.
    """
    from filelock import FileLock

    if kind not in FORMATS:
        raise UsageError(f"no export format is named {kind!r}", f"known: {', '.join(FORMATS)}")
    tools = {name: _tool(name, _TOOLS[name]) for name in _NEEDS[kind]}
    if kind == "sif":
        tools["apptainer"] = _apptainer()
    target = folder / file_name(image, kind)
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{target.name}.lock")
        with contextlib.suppress(TimeoutError):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            progress(Event("stage", f"waiting for another export of {target.name}"))
            lock.acquire()
        try:
            if target.exists():
                return Exported(target, True, target.stat().st_size)
            for left in folder.glob(f".{target.name}.part-*"):
                left.unlink()  # we hold the lock: whoever wrote this is gone
            part = folder / f".{target.name}.part-{os.getpid()}"
            try:
                with tempfile.TemporaryDirectory(prefix="envforge-export-") as scratch:
                    _convert(engine, image, kind, Path(scratch), part.absolute(), tools, progress)
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
        finally:
            lock.release()
    return Exported(target, False, target.stat().st_size)


def file_name(image: ImageInfo, kind: str) -> str:
    """`STACK-TORCH-ID.sqsh`: what it is for people, and the image's id, which alone decides."""
    words = [image.labels.get(LABEL_STACK, ""), image.labels.get(LABEL_TORCH, ""), image.id.rpartition(":")[2][:_ID]]
    # Labels are other people's text; a name of a file is not the place for slashes.
    clean = [re.sub(r"[^A-Za-z0-9._+-]", "_", word).lstrip(".") for word in words]
    return "-".join(word for word in clean if word) + FORMATS[kind]


def _convert(
    engine: ContainerEngine,
    image: ImageInfo,
    kind: str,
    scratch: Path,
    part: Path,
    tools: dict[str, str],
    progress: Progress,
) -> None:
    progress(Event("stage", "taking the image out of the engine"))
    engine.save(image, scratch / "image.tar")
    progress(Event("stage", f"converting it to {kind}"))

    def call(*argv: str) -> None:
        # All paths but the target's are relative: these tools read a colon in a path as the end of it.
        lines: list[str] = []

        def on_line(line: str) -> None:
            lines.append(line)
            progress(Event("line", line))

        done = stream(argv, env={**os.environ, "TMPDIR": str(scratch)}, on_line=on_line, cwd=scratch)
        if done.code != 0:
            text = "\n".join(lines)
            if re.search(r"no space left on device|disk quota exceeded", text, re.I):
                raise DiskFullError(f"the disk filled up while writing {kind}", "free some space, or set TMPDIR")
            last = next((line for line in reversed(lines) if line.strip()), "no reason given")
            raise OutsideError(f"{Path(argv[0]).name} could not convert the image: {last.strip()[:300]}", id="export")

    if kind == "sif":
        call(tools["apptainer"], "build", "--force", str(part), "docker-archive:image.tar")
        return
    skopeo = [tools["skopeo"], "--insecure-policy", "copy", "--quiet", "docker-archive:image.tar"]
    if kind == "oci-archive":
        call(*skopeo, "oci-archive:out.tar:image")
        shutil.copyfile(scratch / "out.tar", part)
        return
    call(*skopeo, "oci:layout:image")
    (scratch / "image.tar").unlink()
    rootless = ["--rootless"] if os.geteuid() != 0 else []
    call(tools["umoci"], "unpack", *rootless, "--image", "layout:image", "bundle")
    root = scratch / "bundle" / "rootfs"
    _for_enroot(root, _configuration(scratch / "layout"))
    # zstd's default of 15 takes several times as long for a few percent; images of this kind hold gigabytes.
    squash = ["-noappend", "-all-root", "-comp", "zstd", "-Xcompression-level", "6", "-no-progress", "-quiet"]
    call(tools["mksquashfs"], str(root), str(part), *squash)


def _configuration(layout: Path) -> dict[str, Any]:
    """`config` of the one image in an OCI layout."""

    def blob(digest: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((layout / "blobs" / digest.replace(":", "/")).read_bytes())
        return found

    index = json.loads((layout / "index.json").read_bytes())
    config = blob(blob(index["manifests"][0]["digest"])["config"]["digest"]).get("config") or {}
    return dict(config)


def _for_enroot(root: Path, config: dict[str, Any]) -> None:
    """The image's environment and start where enroot looks for them; what the image itself has there is replaced."""
    entrypoint = shlex.join(config.get("Entrypoint") or ())
    start = shlex.join(config.get("Cmd") or ("/bin/sh",))
    place = shlex.quote(config.get("WorkingDir") or "/")
    lines = [
        f"mkdir -p {place} 2>/dev/null",
        f"cd {place} && unset OLDPWD || exit 1",
        "if [ -s /etc/rc.local ]; then . /etc/rc.local; fi",
        f'if [ "$#" -gt 0 ]; then exec {entrypoint} "$@"; fi',
        f"exec {entrypoint} {start}",
    ]
    etc = root / "etc"
    etc.mkdir(exist_ok=True)
    for name, text in (
        ("environment", "".join(f"{line}\n" for line in config.get("Env") or ())),
        ("rc", "\n".join(lines) + "\n"),
        ("fstab", ""),
    ):
        file = etc / name
        # A link of the image must not lead our write anywhere else.
        file.unlink(missing_ok=True)
        file.write_text(text, encoding="utf-8")
    (etc / "rc").chmod(0o755)


def _tool(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise OutsideError(
            f"{name} is not installed, and the export goes through it", f"install {package}", id="no-tool"
        )
    return found


def _apptainer() -> str:
    found = shutil.which("apptainer") or shutil.which("singularity")
    if found is None:
        raise OutsideError(
            "neither apptainer nor singularity is installed, and a SIF is made by them",
            "run the export where one is, or export to oci-archive and convert that there: "
            "apptainer build OUT.sif oci-archive:FILE",
            id="no-tool",
        )
    return found


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if no_space(error):
            raise DiskFullError(
                f"no space left while exporting to {folder}", "free some space, or set TMPDIR"
            ) from error
        raise UsageError(f"cannot export to {folder}: {error.strerror or error}", "choose another folder") from error
