"""An OCI bundle of a job's own around the image's unpacked one, for Slurm's `--container`.

srun has no option for mounts, and Slurm (22.05, tried) takes `BUNDLE/rootfs` whatever root.path says. So each job gets
a bundle whose rootfs is a folder of mount points: the image's entries are bound into it, read-only, beside the job's
mounts. The image stays as it is and serves any number of jobs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envforge.errors import DataError, UsageError
from envforge.files import write_atomic
from envforge.jobs.model import JobSpec, Mount

OWN = ("/proc", "/sys", "/dev", "/tmp", "/run")  # the runtime's, or the job's alone


def read_config(image: Path) -> dict[str, Any]:
    """config.json of the image's bundle.

    Raises:
        UsageError: there is none. DataError: it is damaged.
    """
    path = image / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", "--image-file names an OCI bundle: a folder with config.json and rootfs"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error})", "unpack the image again") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} is no OCI configuration", "unpack the image again")
    return config


def write_bundle(spec: JobSpec, mounts: tuple[Mount, ...]) -> Path:
    """Lay the job's bundle out in its output folder; -> the bundle.

    Raises:
        UsageError, DataError: the image's bundle is not there or damaged, or the folder cannot be written.
    """
    image = Path(spec.image_file or "")
    config = read_config(image)
    source = image / str((config.get("root") or {}).get("path") or "rootfs")
    bundle = Path(spec.output) / "bundle"
    targets = [mount.target.rstrip("/") for mount in mounts]
    rows: list[dict[str, Any]] = []
    try:
        (bundle / "rootfs").mkdir(parents=True, exist_ok=True)
        for path, inside in _entries(source, "", targets):
            place = Path(f"{bundle}/rootfs{inside}")
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                place.unlink(missing_ok=True)
                place.symlink_to(path.readlink())
            else:
                rows.append(_row(str(path), inside, "rbind", "ro"))
    except OSError as error:
        raise UsageError(f"the bundle of this job cannot be made in {bundle}: {error.strerror}") from error
    linux = dict(config.get("linux") or {})
    # The tasks of several nodes meet over the network, which a namespace of their own would not have.
    linux["namespaces"] = [row for row in linux.get("namespaces") or [] if row.get("type") not in ("network", "ipc")]
    own = [row for row in config.get("mounts") or [] if isinstance(row, dict)]
    scratch = {"type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}
    rows += [*own, {"destination": "/tmp", **scratch}, {"destination": "/run", **scratch}]
    rows += [_row(mount.source, mount.target, "rbind", "ro" if mount.read_only else "rw") for mount in mounts]
    made = {
        **config,
        "root": {"path": "rootfs", "readonly": False},
        "process": {**(config.get("process") or {}), "terminal": False, "cwd": spec.workdir or "/workspace"},
        "mounts": rows,
        "linux": linux,
    }
    write_atomic(bundle / "config.json", json.dumps(made, indent=1) + "\n")
    return bundle


def image_environment(config: Mapping[str, Any]) -> dict[str, str]:
    """The image's ENV, which Slurm replaces by the job's; PATH is the entrypoint's own work."""
    rows = (config.get("process") or {}).get("env") or []
    found = dict(row.partition("=")[::2] for row in rows if isinstance(row, str) and "=" in row)
    return {name: value for name, value in found.items() if name.isidentifier() and name.isascii() and name != "PATH"}


def _entries(source: Path, inside: str, targets: list[str]) -> Iterator[tuple[Path, str]]:
    """What is bound from the image: whole entries, and where a mount lies deeper in one, its parts."""
    for path in sorted(source.iterdir()):
        place = f"{inside}/{path.name}"
        if place in OWN or place in targets:
            continue
        if any(target.startswith(place + "/") for target in targets) and path.is_dir() and not path.is_symlink():
            yield from _entries(path, place, targets)
        else:
            yield path, place


def _row(source: str, target: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": "bind", "source": source, "options": list(options)}
