"""A real registry (Debian's docker-registry) on loopback with a storage folder of its own; with a password if asked."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from engine_daemon import CannotStart

USER, PASSWORD = "builder", "pa ss:wörd"
# What `htpasswd -nbB` makes of the two; the registry takes bcrypt only.
_HTPASSWD = f"{USER}:$2b$05$abcdefghijklmnopqrstuuqFLmQ.3HrAqiqrcEg7zOXCzfs1cxF92\n"


class OwnRegistry:
    """`host` is what names in it begin with. It can be stopped and started again with what it holds."""

    def __init__(self, folder: Path, *, locked: bool = False, read_only: bool = False) -> None:
        self.folder = folder
        self.locked = locked
        self.read_only = read_only
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and wait until it listens."""
        storage: dict[str, object] = {"filesystem": {"rootdirectory": str(self.folder / "data")}}
        if self.read_only:
            storage["maintenance"] = {"readonly": {"enabled": True}}
        config: dict[str, object] = {"version": 0.1, "storage": storage, "http": {"addr": self.host}}
        if self.locked:
            (self.folder / "htpasswd").write_text(_HTPASSWD)
            config["auth"] = {"htpasswd": {"realm": "tests", "path": str(self.folder / "htpasswd")}}
        # JSON is YAML.
        (self.folder / "config.yml").write_text(json.dumps(config))
        log = (self.folder / "log").open("ab")
        argv = ["docker-registry", "serve", str(self.folder / "config.yml")]
        self.process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        log.close()
        end = time.monotonic() + 30
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.05)
        self.stop()
        raise CannotStart(f"docker-registry did not come up: {(self.folder / 'log').read_text()[-500:]}")

    def stop(self) -> None:
        """End it; safe to call twice."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def own_registry(folder: Path, *, locked: bool = False, read_only: bool = False) -> Iterator[OwnRegistry]:
    """A running registry.

    Raises:
        CannotStart: not here.
    """
    if shutil.which("docker-registry") is None:
        raise CannotStart("docker-registry is not installed (Debian: apt-get install docker-registry)")
    folder.mkdir(parents=True, exist_ok=True)
    registry = OwnRegistry(folder, locked=locked, read_only=read_only)
    try:
        registry.start()
        yield registry
    finally:
        registry.stop()


def docker_login(config: Path, host: str, *, helper: bool = False) -> None:
    """Write the docker configuration that `docker login` writes; with a credential helper where asked."""
    config.mkdir(parents=True, exist_ok=True)
    if helper:
        data: dict[str, object] = {"credHelpers": {host: "envforge-test"}}
    else:
        data = {"auths": {host: {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}}}
    (config / "config.json").write_text(json.dumps(data))
