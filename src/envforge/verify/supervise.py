"""Runs a stage in a process of its own, with limits on time and memory, and turns its end into a finding.

A crash, an out-of-memory kill or a hang of the stage is recorded like any other failure. On failure the stage runs
once more in a fresh process with CUDA_LAUNCH_BLOCKING=1, so that a CUDA error is reported by the operator that caused
it; both errors are kept.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from envforge.verify.record import FAIL, SKIP, WARN, Check, progress, read_events
from envforge.verify.settings import Settings

POLL = 0.5  # seconds between looks at a stage process
TAIL = 4000
# What the driver, the C library and the kernel say in a log when memory or the device is the cause.
TELLING = ("out of memory", "CUDA error", "device-side assert", "Segmentation fault", "Killed", "Bus error")


@dataclass
class Run:
    """One run of a stage: `outcome` is done, crash, hang, memory or exit; `error` what the process itself said."""

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
class Layer:
    """The answer of one layer: its checks (of the first run), and every run of it."""

    name: str
    status: str
    checks: list[Check]
    runs: list[Run] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the receipt."""
        return {
            "layer": self.name,
            "status": self.status,
            "seconds": round(sum(run.seconds for run in self.runs), 2),
            "checks": [asdict(check) for check in self.checks],
            "runs": [run.to_json() for run in self.runs],
        }


def skipped(name: str, why: str) -> Layer:
    """A layer that was not run."""
    return Layer(name, SKIP, [Check(id=f"{name}.all", layer=name, status=SKIP, text=why)])


def run_layer(name: str, settings: Settings) -> Layer:
    """Run one layer, and run it again where that can tell more."""
    first = run_stage(name, replace(settings, launch_blocking=False))
    runs = [first]
    checks = list(first.checks)
    if first.failed:
        again = why_again(first, settings)
        if again:
            progress(f"{name}: failed, running once more in a fresh process with CUDA_LAUNCH_BLOCKING=1")
            second = run_stage(name, replace(settings, launch_blocking=True))
            runs.append(second)
            checks.append(compare(name, first, second, settings))
    return Layer(name, status_of(checks), checks, runs, dict(first.notes))


def why_again(first: Run, settings: Settings) -> bool:
    """On a GPU every failure is run again; elsewhere only one where something broke, and a hang costs too much."""
    if settings.device == "cuda":
        return True
    return first.raised and first.outcome != "hang"


def compare(name: str, first: Run, second: Run, settings: Settings) -> Check:
    """What the second run adds, as a check of its own; it never turns a failure into a pass."""
    check = Check(id=f"{name}.rerun", layer=name, status=WARN, seconds=second.seconds)
    one, two = summary_of(first), summary_of(second)
    check.figure(first=one, second=two, cuda_launch_blocking=settings.device == "cuda")
    if settings.device != "cuda":
        check.figure(note="without a GPU the variable changes nothing: this shows only whether the failure repeats")
    if not second.failed:
        check.text = "passed when run again: the failure does not repeat, so look at memory, time and other processes"
    elif one == two:
        check.text = f"failed again in the same way: {two}"
    else:
        check.text = f"failed again, and this error is the closer one: {two}"
    return check


def summary_of(run: Run) -> str:
    """One sentence on how a run ended."""
    if run.outcome != "done":
        return run.error
    for check in run.checks:
        if check.status == FAIL:
            return f"{check.id}: {check.text}"
    return "passed"


def status_of(checks: list[Check]) -> str:
    """fail before warn before pass; skip only when nothing was checked."""
    states = [check.status for check in checks]
    if FAIL in states:
        return FAIL
    if states and all(state == SKIP for state in states):
        return SKIP
    return WARN if WARN in states else "pass"


def run_stage(name: str, settings: Settings) -> Run:
    """One process for one layer. Never raises for what happens inside it."""
    work = Path(settings.workdir)
    suffix = "-blocking" if settings.launch_blocking else ""
    settings_file, events = work / f"{name}{suffix}.settings.json", work / f"{name}{suffix}.events"
    log = work / f"{name}{suffix}.log"
    for old in (events, log):
        if old.exists():
            old.unlink()
    settings.dump(settings_file)
    env = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1")
    # Threads that wait in a busy loop slow each other down four times on a machine with other work to do.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if settings.launch_blocking:
        # Read when CUDA starts, so it must be there before the process is. TORCH_USE_CUDA_DSA also wants a torch that
        # was compiled with it; setting it is harmless where it was not.
        env.update(CUDA_LAUNCH_BLOCKING="1", TORCH_USE_CUDA_DSA="1")
    home = Path(__file__).resolve().parents[2]
    if home.name not in ("site-packages", "dist-packages"):
        # The scratch folder becomes the working folder, so a checkout or a copy must be found by its path.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "envforge.verify.stage", str(settings_file), name, str(events)]
    run = Run(name, settings.launch_blocking)
    limit = settings.limits.get(name, 1800.0)
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=str(work),  # frameworks leave caches in the working folder
            start_new_session=True,  # a group of its own, so that what it started ends with it
        )
        try:
            _watch(process, run, start + limit, settings.memory_limit_mib)
        finally:
            _end_group(process)
    run.seconds = round(time.monotonic() - start, 2)
    run.returncode = process.returncode
    run.checks, run.notes, run.died_in = read_events(events)
    run.log_tail = log.read_bytes()[-TAIL:].decode("utf-8", "replace")
    _judge(run, limit, settings.memory_limit_mib)
    return run


def _watch(process: subprocess.Popen[bytes], run: Run, deadline: float, limit_mib: int | None) -> None:
    while True:
        try:
            process.wait(timeout=POLL)
            return
        except subprocess.TimeoutExpired:
            pass
        used = group_mib(process.pid)
        run.peak_mib = max(run.peak_mib, used)
        if limit_mib and used > limit_mib:
            run.outcome = "memory"
            return
        if time.monotonic() > deadline:
            run.outcome = "hang"
            # faulthandler prints where every thread stands, which is what one wants to know of a hang.
            os.kill(process.pid, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            return


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def group_mib(group: int) -> float:
    """Resident memory in MiB of all processes in a process group; 0 where /proc is not there."""
    pages = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
            fields = stat[stat.rindex(")") + 2 :].split()
            if int(fields[2]) == group:
                pages += int(fields[21])
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1) if pages else 0.0


def _judge(run: Run, limit: float, limit_mib: int | None) -> None:
    """Give the end of the process a name, and a failed check when it was not a proper one."""
    code = run.returncode
    if run.outcome == "hang":
        run.error = f"no end within {limit:g} s; it was ended"
    elif run.outcome == "memory":
        run.error = f"used {run.peak_mib:.0f} MiB, more than the limit of {limit_mib} MiB; it was ended"
    elif code is not None and code < 0:
        run.outcome = "crash"
        run.signal = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        run.error = f"the process was ended by {run.signal}" + (
            ", which is how the kernel ends a process when memory runs out" if run.signal == "SIGKILL" else ""
        )
    elif code:
        run.outcome = "exit"
        run.error = f"the process ended with exit code {code}: {_last_line(run.log_tail)}"
    elif run.died_in is not None:
        run.outcome = "exit"
        run.error = f"the process ended in the middle of {run.died_in}"
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


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"
