"""A store of their own for podman and buildah, and a runtime that works where this machine limits its children."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_base import BASE, rootfs
from engine_daemon import CannotStart, remove_folder


@contextmanager
def own_store() -> Iterator[dict[str, str]]:
    """Variables that point both tools at a fresh store which holds the base image; all of it is gone afterwards.

    Raises:
        CannotStart: podman is not here, or cannot run a container here.
    """
    if shutil.which("podman") is None:
        raise CannotStart("podman is not installed (Debian: apt-get install podman)")
    if os.geteuid() != 0:
        raise CannotStart("the tests of podman make their store as root")
    folder = Path(tempfile.mkdtemp(prefix="envforge-store-"))
    env = {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
    }
    (folder / "registries.conf").write_text('unqualified-search-registries = []\nshort-name-mode = "disabled"\n')
    # Containers may not raise limits where the tests themselves may not.
    limits = ["nofile=1024:1024", "nproc=1024:1024"]
    runtime = "runc" if shutil.which("runc") else "crun"
    (folder / "containers.conf").write_text(
        f"[containers]\ndefault_ulimits = {json.dumps(limits)}\n[engine]\n"
        f'runtime = "{runtime}"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    try:
        for driver in ("overlay", "vfs"):  # not every file system carries an overlay
            graph, run = folder / driver / "graph", folder / driver / "run"
            (folder / "storage.conf").write_text(
                f'[storage]\ndriver = "{driver}"\ngraphroot = "{graph}"\nrunroot = "{run}"\n'
            )
            if _podman(env, "info").returncode == 0:
                break
        made = _podman(env, "import", "--quiet", str(rootfs()), BASE)
        if made.returncode != 0:
            raise CannotStart(f"podman cannot take the base image: {made.stderr[-400:]}")
        ran = _podman(env, "run", "--rm", "--network=none", BASE, "true")
        if ran.returncode != 0:
            raise CannotStart(f"podman cannot run a container here: {ran.stderr[-400:]}")
        yield env
    finally:
        remove_folder(folder)


def _podman(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    argv = ["podman", *words]
    return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False)
