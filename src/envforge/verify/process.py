"""One stage process: started, watched against its limits, ended, and what came of each of its layers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from envforge.verify.record import FAIL, Check, Story, progress, read_events
from envforge.verify.settings import Settings

POLL, RESCAN = 0.5, 3.0  # seconds between looks at a stage process, and at which processes belong to it
TAIL, TAIL_FAILED = 2000, 16000  # bytes of a layer's log in the receipt; the cause may stand far above the end
# What the driver, the C library and the kernel say in a log when memory or the device is the cause.
TELLING = ("out of memory", "CUDA error", "device-side assert", "Segmentation fault", "Killed", "Bus error")


@dataclass
class Run:
    """One run of a layer: `outcome` is done, crash, hang, memory or exit; `error` what the process itself said."""

    layer: str
    launch_blocking: bool
    outcome: str = "done"
    seconds: float = 0.0
    peak_mib: float = 0.0
    returncode: int | None = None
    signal: str | None = None
    died_in: str | None = None
    error: str = ""
    log_tail: str = ""
    checks: list[Check] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a check failed or the process broke."""
        return self.outcome != "done" or any(check.status == FAIL for check in self.checks)

    @property
    def raised(self) -> bool:
        """Whether something broke, as against a figure that is not good enough."""
        return self.outcome != "done" or any(check.error for check in self.checks if check.status == FAIL)

    def to_json(self) -> dict[str, Any]:
        """Plain data without what the layers of the receipt already hold."""
        data = asdict(self)
        data["failed_checks"] = [check["id"] for check in data.pop("checks") if check["status"] == FAIL]
        data.pop("notes")
        return data


@dataclass
class _Watched:
    """What was seen from outside: why it was ended, and the peak memory (MiB) of each layer by its place."""

    outcome: str = "done"
    peaks: dict[int, float] = field(default_factory=dict)


def run_stages(names: list[str], settings: Settings, announce: bool = False) -> list[Run]:
    """One process for these layers, up to the first that fails. Never raises for what happens inside it.

    Returns:
        One run for each layer that began, at least one; only the last can have failed.
    """
    work = Path(settings.workdir)
    stem = "-to-".join(dict.fromkeys((names[0], names[-1]))) + ("-blocking" if settings.launch_blocking else "")
    settings_file, events, log = work / f"{stem}.settings.json", work / f"{stem}.events", work / f"{stem}.log"
    for old in (events, log):
        if old.exists():
            old.unlink()
    settings.dump(settings_file)
    command = [sys.executable, "-m", "envforge.verify.stage", str(settings_file), ",".join(names), str(events)]
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(settings.launch_blocking),
            cwd=str(work),  # frameworks leave caches in the working folder
            start_new_session=True,  # a group of its own, so that what it started ends with it
        )
        try:
            watched = _watch(process, events, names, settings, start, announce)
        finally:
            _end_group(process)
    end = time.monotonic()
    stories = read_events(events) or [Story(names[0])]
    text = log.read_bytes()
    runs = []
    for place, story in enumerate(stories):
        last = place == len(stories) - 1
        run = Run(story.layer or names[place], settings.launch_blocking)
        run.checks, run.notes, run.died_in = story.checks, story.notes, story.open_id
        began = story.began if place else start
        run.seconds = round((end if last else story.ended or end) - began, 2)
        run.peak_mib = watched.peaks.get(place, 0.0)
        until = len(text) if last else stories[place + 1].log_start
        said = text[story.log_start : until]
        run.log_tail = said[-TAIL_FAILED:].decode("utf-8", "replace")
        if last:
            run.outcome, run.returncode = watched.outcome, process.returncode
            _judge(run, story.ended is not None, settings.limits.get(run.layer, 1800.0), settings.memory_limit_mib)
        else:
            run.returncode = 0
        if not run.failed:
            run.log_tail = said[-TAIL:].decode("utf-8", "replace")
        runs.append(run)
    return runs


def environment(launch_blocking: bool) -> dict[str, str]:
    """Environment variables of a stage process."""
    env = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1")
    # Threads that wait in a busy loop slow each other down four times on a machine with other work to do.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if launch_blocking:
        # Read when CUDA starts, so it must be there before the process is. TORCH_USE_CUDA_DSA also wants a torch that
        # was compiled with it; setting it is harmless where it was not.
        env.update(CUDA_LAUNCH_BLOCKING="1", TORCH_USE_CUDA_DSA="1")
    home = Path(__file__).resolve().parents[2]
    if home.name not in ("site-packages", "dist-packages"):
        # The scratch folder becomes the working folder, so a checkout or a copy must be found by its path.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), env.get("PYTHONPATH")]))
    return env


def _watch(
    process: subprocess.Popen[bytes], events: Path, names: list[str], settings: Settings, start: float, announce: bool
) -> _Watched:
    """Wait for the end; each layer has its own time, counted from where the one before it ended."""
    seen = _Watched()
    memory = GroupMemory(process.pid)
    place, began, size = -1, start, -1
    while True:
        ended = True
        try:
            process.wait(timeout=POLL)
        except subprocess.TimeoutExpired:
            ended = False
        now_size = events.stat().st_size if events.exists() else 0
        if now_size != size:
            size = now_size
            stories = read_events(events)
            for later in range(place + 1, len(stories)):
                if announce:
                    progress(f"{stories[later].layer} ...")
                place, began = later, stories[later].began if later else start
        if ended:
            return seen
        used = memory.mib()
        seen.peaks[max(place, 0)] = max(seen.peaks.get(max(place, 0), 0.0), used)
        if settings.memory_limit_mib and used > settings.memory_limit_mib:
            seen.outcome = "memory"
            return seen
        if time.monotonic() > began + settings.limits.get(names[max(place, 0)], 1800.0):
            seen.outcome = "hang"
            # faulthandler prints where every thread stands, which is what one wants to know of a hang.
            os.kill(process.pid, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            return seen


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class GroupMemory:
    """Resident memory of all processes in a group, MiB. Looking through /proc costs as much as a small check, so the
    members are looked up every few seconds and only asked in between."""

    def __init__(self, group: int) -> None:
        self.group, self.members, self.looked = group, [group], 0.0

    def mib(self) -> float:
        """Now; 0 where /proc is not there."""
        if time.monotonic() > self.looked + RESCAN:
            self.looked = time.monotonic()
            pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if os.path.isdir("/proc") else []  # noqa: PTH112, PTH208
            self.members = [pid for pid in pids if self._group_of(pid) == self.group]
        pages = 0
        for pid in self.members:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1) if pages else 0.0

    @staticmethod
    def _group_of(pid: int) -> int | None:
        try:
            return os.getpgid(pid)
        except OSError:
            return None


def signal_name(returncode: int) -> str:
    """The name of the signal behind a negative return code."""
    return signal.Signals(-returncode).name if -returncode in set(signal.Signals) else str(-returncode)


def _judge(run: Run, ended: bool, limit: float, limit_mib: int | None) -> None:
    """Give the end of the process a name, and a failed check when it was not a proper one."""
    code = run.returncode
    if run.outcome == "hang":
        run.error = f"no end within {limit:g} s; it was ended"
    elif run.outcome == "memory":
        run.error = f"used {run.peak_mib:.0f} MiB, more than the limit of {limit_mib} MiB; it was ended"
    elif code is not None and code < 0:
        run.outcome = "crash"
        run.signal = signal_name(code)
        run.error = f"the process was ended by {run.signal}" + (
            ", which is how the kernel ends a process when memory runs out" if run.signal == "SIGKILL" else ""
        )
    elif code:
        run.outcome = "exit"
        run.error = f"the process ended with exit code {code}: {last_line(run.log_tail)}"
    elif run.died_in is not None or not ended:
        run.outcome = "exit"
        run.error = f"the process ended in the middle of {run.died_in or run.layer}"
    if run.outcome == "done":
        return
    telling = [line.strip() for line in run.log_tail.splitlines() if any(word in line for word in TELLING)]
    text = run.error + (f" (in {run.died_in})" if run.died_in else "")
    if telling:
        text += f"; its log says: {telling[-1][:300]}"
    run.checks.append(
        Check(
            id=run.died_in or f"{run.layer}.process",
            layer=run.layer,
            status=FAIL,
            text=text,
            figures={"outcome": run.outcome, "signal": run.signal, "returncode": code, "peak_mib": run.peak_mib},
            seconds=run.seconds,
            error=run.log_tail,
        )
    )


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"
