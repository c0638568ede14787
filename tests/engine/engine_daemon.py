"""A private docker engine for tests: own data root, exec root, socket and pid file in one temporary folder.

Nothing of another docker on the machine is touched: every process that is ended here is found by its id, and belongs to
the folder. What a killed run left behind is swept away by the next one, and never in its way.

By hand: `python tests/engine/engine_daemon.py` starts one with the base image and keeps it until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "envforge-dockerd-"
START_SECONDS = 90


class CannotStart(RuntimeError):
    """No private engine can be had here; the text says why."""


class Daemon:
    """One dockerd with everything in `folder`."""

    def __init__(self, folder: Path, data_root: Path | None = None) -> None:
        self.folder = folder
        self.data_root = data_root or folder / "data"
        self.socket = folder / "docker.sock"
        self.log = folder / "dockerd.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        """For DOCKER_HOST."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """Process id of dockerd."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start and wait until it answers."""
        reason = why_not()
        if reason:
            raise CannotStart(reason)
        # A previous run of this very folder may have been killed: its pid files name processes that are gone, or worse,
        # that are somebody else's by now.
        for stale in (self.folder / "docker.pid", self.socket, self.folder / "exec" / "containerd" / "containerd.pid"):
            stale.unlink(missing_ok=True)
        argv = [
            "dockerd",
            f"--data-root={self.data_root}",
            f"--exec-root={self.folder / 'exec'}",
            f"--pidfile={self.folder / 'docker.pid'}",
            f"--host={self.host}",
            "--shutdown-timeout=2",
            "--bridge=none",  # no bridge and no firewall rules: builds use the host's network
            "--iptables=false",
            "--ip6tables=false",
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            if self.answers():
                return
            time.sleep(0.2)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
        self.stop()
        raise CannotStart(f"dockerd did not come up:\n{tail}")

    def answers(self) -> bool:
        """Does it answer?"""
        import docker
        from docker.errors import DockerException

        try:
            client = docker.DockerClient(base_url=self.host, timeout=10)
            try:
                return bool(client.ping())
            finally:
                client.close()
        except (DockerException, OSError):
            return False

    def kill(self) -> None:
        """Die as by a power cut: no warning to anybody."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._end_children()

    def stop(self) -> None:
        """End everything that belongs to the folder; safe to call twice."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._end_children()

    def _end_children(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = processes_of(self.folder)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            end = time.monotonic() + 5
            while left and time.monotonic() < end:
                left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
                time.sleep(0.1)

    def remove(self) -> None:
        """Take the folder away, mounts first."""
        remove_folder(self.folder)


def why_not() -> str | None:
    """Why no private engine can run here, None where it can."""
    if os.geteuid() != 0:
        return "a private docker engine needs root"
    if shutil.which("dockerd") is None:
        return "dockerd is not installed (Debian: apt-get install docker.io)"
    return None


def processes_of(folder: Path) -> list[int]:
    """Ids of engine processes whose command line names the folder (containerd, its shims, dockerd)."""
    found = []
    needle = str(folder).encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            program = Path(os.fsdecode(words[0])).name
            if program in ("dockerd", "containerd", "containerd-shim-runc-v2", "containerd-shim", "runc") and any(
                needle in word for word in words
            ):
                found.append(int(entry.name))
    return found


def remove_folder(folder: Path) -> None:
    """Unmount what is mounted below, deepest first, then delete."""
    with contextlib.suppress(OSError):
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(f"{folder}/")), key=len, reverse=True):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove what killed test runs left: folders of ours whose owner is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if folder.stat().st_uid != os.geteuid():
                continue
            owner, born = (folder / "owner").read_text().split()
            if _born(int(owner)) == born:
                continue
            left = Daemon(folder)
            left.stop()
            left.remove()


def _born(pid: int) -> str:
    """When a process started, in clock ticks; tells a reused id from the process that had it before."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@contextlib.contextmanager
def private_daemon(tmpfs_mib: int | None = None) -> Iterator[Daemon]:
    """A running engine; gone, with its folder, when the block ends.

    Args:
        tmpfs_mib: put the data root on a memory disk of that size, to fill it up.

    Raises:
        CannotStart: not here.
    """
    reason = why_not()
    if reason:
        raise CannotStart(reason)
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    (folder / "owner").write_text(f"{os.getpid()} {_born(os.getpid())}\n")
    daemon = Daemon(folder)
    try:
        if tmpfs_mib is not None:
            daemon.data_root.mkdir()
            options = ["-o", f"size={tmpfs_mib}m", "-t", "tmpfs"]
            subprocess.run(["mount", *options, "tmpfs", str(daemon.data_root)], check=True)
        daemon.start()
        yield daemon
    finally:
        daemon.stop()
        daemon.remove()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from engine_base import BASE, import_base

    with private_daemon() as own:
        import_base(own)
        print(f"export DOCKER_HOST={own.host}   # base: {BASE}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
