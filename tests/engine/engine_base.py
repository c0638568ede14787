"""The base image of the engine tests: Debian with its own Python, made by debootstrap from apt's own sources."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from engine_daemon import CannotStart, Daemon, remove_folder
from filelock import FileLock

BASE = "envforge-test/base:bookworm"
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
PYTHON = "3.11"  # what that release has
# Read once: tests give what they run a cache folder of its own.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "envforge-tests"
# Not needed by anything that runs inside, and half of the size.
_LEFT_OUT = (
    "./var/cache/apt/*",
    "./var/lib/apt/lists/*",
    "./usr/share/doc/*",
    "./usr/share/man/*",
    "./usr/share/locale/*",
)


def mirror() -> str:
    """The Debian mirror that this machine's apt uses.

    Raises:
        CannotStart: there is none, or apt is not there.
    """
    try:
        answer = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(COMPONENT)|$(REPO_URI)", "Created-By: Packages"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotStart("apt does not say which mirror it uses: this is no Debian") from error
    for line in answer.stdout.splitlines():
        origin, component, uri = line.split("|", 2)
        if component == "main" and "security" not in uri and origin in ("Debian", "$(ORIGIN)", ""):
            return uri
    raise CannotStart("apt has no Debian mirror in its sources")


def rootfs() -> Path:
    """The tar of the base's file system; made once, kept in the user's cache folder.

    Raises:
        CannotStart: debootstrap is missing or failed.
    """
    recipe = repr((SUITE, PACKAGES, _LEFT_OUT, 1))
    CACHE.mkdir(parents=True, exist_ok=True)
    tar = CACHE / f"base-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.tar"
    with FileLock(f"{tar}.lock"):
        if tar.is_file():
            return tar
        if shutil.which("debootstrap") is None:
            raise CannotStart("debootstrap is not installed (Debian: apt-get install debootstrap)")
        scratch = Path(tempfile.mkdtemp(prefix="envforge-base-"))
        fresh = tar.with_suffix(f".{os.getpid()}")
        try:
            root = scratch / "root"
            argv = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root), mirror()]
            made = subprocess.run(argv, capture_output=True, text=True, check=False)
            if made.returncode != 0:
                raise CannotStart(f"debootstrap failed: {made.stdout[-500:]}{made.stderr[-500:]}")
            left_out = [f"--exclude={pattern}" for pattern in _LEFT_OUT]
            subprocess.run(["tar", "-C", str(root), "--numeric-owner", *left_out, "-cf", str(fresh), "."], check=True)
            fresh.replace(tar)
        finally:
            fresh.unlink(missing_ok=True)
            remove_folder(scratch)  # debootstrap mounts /proc in it
    return tar


def import_base(daemon: Daemon) -> str:
    """Give the engine the base image; returns its reference."""
    import docker

    client = docker.DockerClient(base_url=daemon.host, timeout=600)
    with contextlib.closing(client):
        name, _, tag = BASE.rpartition(":")
        client.api.import_image_from_file(str(rootfs()), repository=name, tag=tag)
    return BASE
