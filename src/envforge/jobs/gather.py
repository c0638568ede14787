"""All that is known of a job, for a diagnosis or to send: logs, accounting, plan, script, preflights, receipts."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from envforge.errors import EnvforgeError
from envforge.jobs.follow import JobState, follower
from envforge.jobs.record import RECORD, Record

PLAN = "plan.json"
ACCOUNTING = "accounting.txt"
_SACCT = "JobID,JobName,State,ExitCode,Elapsed,Timelimit,MaxRSS,ReqMem,NodeList,Reason"


@dataclass(frozen=True, slots=True)
class Gathered:
    """What was found of a job. `logs` by rank; `accounting`: the scheduler's words; `notes`: what is missing."""

    record: Record
    state: JobState | None
    logs: tuple[Path, ...] = ()
    accounting: str = ""
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the variables that the job got as secrets."""
        return tuple(str(name).partition("=")[0] for name in self.record.extra.get("secrets") or ())


def gather(record: Record) -> Gathered:
    """All of a job's traces; what cannot be had is noted, and never an error: the rest may still tell."""
    notes: list[str] = []
    state: JobState | None = None
    words = ""
    logs: list[Path] = []
    back = follower(record)
    try:
        state = back.status(record)
        words = f"envforge: job {record.name}: {state.state} ({state.word}) {state.reason}".rstrip() + "\n"
    except EnvforgeError as error:
        notes.append(f"the scheduler was not asked: {error.cause}")
    try:
        words += _accounting(record)
    except EnvforgeError as error:
        notes.append(f"no accounting: {error.cause}")
    try:
        logs = back.log_files(record)
    except EnvforgeError as error:
        notes.append(f"logs as they lie in the folder: {error.cause}")
        logs = sorted(Path(record.output).glob(f"{record.job_id}*.log")) if record.output and record.job_id else []
    if not logs:
        notes.append("there are no logs")
    return Gathered(record, state, tuple(logs), words, _files(record), tuple(dict.fromkeys(notes)))


def _files(record: Record) -> tuple[Path, ...]:
    if not record.output:
        return ()
    folder = Path(record.output)
    names = [RECORD, PLAN, record.script]
    found = [folder / name for name in names if name and (folder / name).is_file()]
    found += sorted(folder.glob(f"preflight-{record.job_id}-*.json"))
    return (*found, *sorted(folder.glob("receipt-*.json")))


def _accounting(record: Record) -> str:
    if record.backend == "kubernetes":
        from envforge.jobs.kubernetes import accounting

        return accounting(record)
    number = record.job_id or ""
    if not number:
        return ""
    said = _said(["scontrol", "show", "job", number])
    return said + _said(["sacct", "--parsable2", f"--jobs={number}", f"--format={_SACCT}"])


def _said(argv: list[str]) -> str:
    """What one of Slurm's programs prints, "" where it is not there or says no."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=60, check=False, stdin=subprocess.DEVNULL
        )
        return done.stdout if done.returncode == 0 else ""
    return ""
