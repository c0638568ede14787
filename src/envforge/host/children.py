"""Child processes that may never end: a wedged NVIDIA driver holds its callers in the kernel, deaf to every signal.

Each child gets its own process group and a time limit. A child over its limit has its group killed and is left
behind: it is never waited for, since a process in uninterruptible sleep would take us with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_BYTES = 2_000_000
TIMED_OUT = 124  # the exit code that timeout(1) uses


@dataclass(frozen=True, slots=True)
class Child:
    """A command and its time limit in seconds."""

    argv: Sequence[str]
    limit: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code (124: over its limit, 127: no such program, negative: killed by that signal) and stdout with stderr."""

    rc: int
    text: str


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    ends: float
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0

    def read(self) -> bool:
        """Take what lies in the pipe; False at its end."""
        assert self.process.stdout is not None
        while self.size <= MAX_BYTES:
            try:
                chunk = os.read(self.process.stdout.fileno(), 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.chunks.append(chunk)
            self.size += len(chunk)
        return True

    def outcome(self, rc: int) -> Outcome:
        return Outcome(rc, b"".join(self.chunks)[:MAX_BYTES].decode("utf-8", "replace"))


def run_children(children: Mapping[str, Child], env: Mapping[str, str] | None = None) -> dict[str, Outcome]:
    """Run all of them at the same time, in the C locale, without input.

    Args:
        children: name -> command; limits count from the common start.
        env: the environment instead of this process's own.

    Returns:
        name -> outcome, for every child, no later than the longest limit (plus some milliseconds).
    """
    surroundings = {**(os.environ if env is None else env), "LC_ALL": "C", "LANG": "C"}
    surroundings.pop("LANGUAGE", None)
    outcomes: dict[str, Outcome] = {}
    running: dict[str, _Running] = {}
    started = time.monotonic()
    with selectors.DefaultSelector() as selector:
        try:
            for name, child in children.items():
                try:
                    process = subprocess.Popen(
                        list(child.argv),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        env=surroundings,
                        start_new_session=True,
                    )
                except FileNotFoundError:
                    outcomes[name] = Outcome(127, "")
                    continue
                except OSError as error:
                    outcomes[name] = Outcome(126, error.strerror or str(error))
                    continue
                running[name] = _Running(process, started + child.limit)
                assert process.stdout is not None
                os.set_blocking(process.stdout.fileno(), False)
                selector.register(process.stdout, selectors.EVENT_READ, name)
            while running:
                for ready, _ in selector.select(timeout=0.05):
                    # A closed pipe does not mean that the child has ended: it is polled below.
                    if not running[ready.data].read():
                        selector.unregister(ready.fileobj)
                for name, state in list(running.items()):
                    rc = state.process.poll()
                    if rc is None and time.monotonic() < state.ends and state.size <= MAX_BYTES:
                        continue
                    if rc is None:
                        rc = TIMED_OUT
                        _kill(state.process)
                    else:
                        state.read()
                    outcomes[name] = state.outcome(rc)
                    assert state.process.stdout is not None
                    with contextlib.suppress(KeyError, ValueError):
                        selector.unregister(state.process.stdout)
                    state.process.stdout.close()
                    del running[name]
        finally:
            for state in running.values():
                _kill(state.process)
    return {name: outcomes[name] for name in children}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the whole group, then a short look whether it ended; a child stuck in the kernel stays behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    ends = time.monotonic() + 0.5
    while process.poll() is None and time.monotonic() < ends:
        time.sleep(0.01)
