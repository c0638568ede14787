"""Runs one program to its end, line by line, and takes it along when we are stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envforge.ending import ended_as_exit

_TAIL = 400
_GRACE = 15.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Exit code and the last lines of the output (both streams together)."""

    code: int
    tail: list[str]


def stream(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    on_line: Callable[[str], None],
    log: Path | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run a program without a terminal or input; every output line goes to `on_line` and into `log` (appended).

    The program gets a session of its own, so a Ctrl-C reaches it only through us: it is asked to stop, given some
    seconds, then killed with everything it started. Nothing of it is left when this returns or raises.

    Raises:
        OSError: the program cannot be started.
        KeyboardInterrupt, SystemExit: we were stopped; the program is gone by then.
    """
    tail: deque[str] = deque(maxlen=_TAIL)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open("a", encoding="utf-8")) if log else None
        stack.enter_context(ended_as_exit())
        child = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                line = line.rstrip("\r\n")
                tail.append(line)
                if out:
                    out.write(line + "\n")
                    out.flush()
                on_line(line)
            child.wait()
        except BaseException:
            _stop(child)
            raise
        finally:
            if child.stdout:
                child.stdout.close()
    return Finished(child.returncode, list(tail))


def _stop(child: subprocess.Popen[str]) -> None:
    # What it started may have sessions of its own: podman leaves a running step behind, containers and all.
    known = _descendants(child.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        # The whole session: the program's own children would hold the pipe, and the work, otherwise.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        try:
            child.wait(_GRACE if number == signal.SIGINT else 3)
            break
        except subprocess.TimeoutExpired:
            continue
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for pid, born in known.items():
        # The number may be somebody else's by now.
        if _stat(pid)[1] == born:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> dict[int, str]:
    """All that a process started, directly or not, with the moment at which each began; empty without a /proc."""
    children: dict[int, list[int]] = {}
    born: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                parent, moment = _stat(int(entry.name))
                children.setdefault(parent, []).append(int(entry.name))
                born[int(entry.name)] = moment
    found: dict[int, str] = {}
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found[child] = born[child]
            queue.append(child)
    return found


def _stat(pid: int) -> tuple[int, str]:
    """Parent and start of a process, (0, "") where it is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(words[1]), words[19]
    except (OSError, IndexError, ValueError):
        return 0, ""
