"""Slurm's own programs: submit once, ask what became of a job, cancel it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from envforge.errors import DataError, OutsideError, UsageError
from envforge.files import write_atomic
from envforge.jobs.follow import JobState
from envforge.jobs.model import JobSpec
from envforge.jobs.record import Record, keep_plan, made_folder, new_record, read_record, submitted, write_record
from envforge.jobs.slurm import SCRIPT, job_name

SECONDS = 60  # a controller that takes longer for an answer is as good as down
_STATES = {
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting", "REQUEUE_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting", "RUNNING": "running", "COMPLETING": "running", "SUSPENDED": "running",
    "STOPPED": "running", "STAGE_OUT": "running", "COMPLETED": "done", "CANCELLED": "cancelled", "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
}  # fmt: skip
_DOWN = "the controller does not answer: try again later; the same command looks first whether the job is there"
# Slurm's words -> what to do.
_HINTS = (
    (
        r"configuration source|configless|Unable to process configuration file",
        "this machine is not set up for Slurm: run this on a login node, or write the script here and sbatch it there",
    ),
    (
        r"contact slurm controller|Connection refused|Socket timed out|Transport endpoint|Unable to establish",
        _DOWN,
    ),
    (
        r"[Mm]unge|authentication|credential",
        "munge on this machine and on the controller must run with the same key and clock: tell the administrator",
    ),
    (r"[Ii]nvalid partition", 'name another --partition; sinfo --format="%P %l %G" lists them'),
    (
        r"[Ii]nvalid account",
        "name an --account that is yours: sacctmgr show associations user=$USER format=account,partition,qos",
    ),
    (r"[Ii]nvalid qos", "name another --qos: sacctmgr show associations user=$USER format=qos"),
    (r"[Ii]nvalid feature", 'correct --constraint; sinfo --format="%N %f" lists the features'),
    (r"gres|generic resource", 'sinfo --format="%N %G" lists the GPUs of each node'),
    (r"time limit", 'ask for less --time; sinfo --format="%P %l" lists the limits'),
    (r"[Nn]ode configuration|node count|CPU count|[Mm]emory", "no node has that: ask for fewer nodes, GPUs or memory"),
    (r"Limit|limit|[Vv]iolates", "a limit of the cluster is reached: wait for other jobs, or ask for less"),
)


def _slurm(argv: Sequence[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(argv), capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False,
            stdin=subprocess.DEVNULL, env=env,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise OutsideError(
            f"{argv[0]} is not on this machine",
            "run this where Slurm's programs are (a login node), or write the script here and sbatch it there",
            id="no-slurm",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise OutsideError(f"{argv[0]} gave no answer within {SECONDS} s", _DOWN, id="slurm-down") from error


def failure(what: str, words: str) -> OutsideError:
    """Slurm's own words, and what to do about them."""
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line) for line in words.splitlines() if line.strip()]
    said = "; ".join(dict.fromkeys(lines))[:600] or "no reason given"
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, words)), "the words above are Slurm's own")
    down = hint == _DOWN
    return OutsideError(f"{what}: {said}", hint, id="slurm-down" if down else "slurm-refused")


def submit_environment(spec: JobSpec) -> dict[str, str]:
    """What sbatch itself gets to see, and Slurm with it: nothing that the job is not meant to have."""
    own = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "XDG_RUNTIME_DIR", *spec.passed_variables, *spec.secrets)
    return {
        name: value
        for name, value in os.environ.items()
        if name in own or name.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "MUNGE"))
    }


class Known(NamedTuple):
    """A job that Slurm has: its number, and the folder that it was submitted from (ours: the one of its traces)."""

    number: str
    folder: str


def find_job(spec: JobSpec) -> Known | None:
    """The last job with this one's key, whatever its state; None when Slurm knows of none.

    Raises:
        OutsideError: the controller does not answer.
    """
    name = job_name(spec)
    own = f"--user={os.getuid()}"
    queue = _slurm(["squeue", "--noheader", "--states=all", own, f"--name={name}", "--format=%i|%k|%Z"])
    if queue.returncode:
        raise failure("Slurm does not say which jobs there are", queue.stderr)
    rows = [line.strip().split("|", 2) for line in queue.stdout.splitlines()]
    known = [Known(row[0], row[2]) for row in rows if len(row) == 3 and spec.key() in row[1]]
    if not known:
        try:
            history = _slurm(["sacct", "--noheader", "--parsable2", "--allocations", "--starttime=now-30days",
                              f"--name={name}", "--format=JobID,WorkDir"])  # fmt: skip
        except OutsideError:
            return None
        # Without accounting there is no history; the queue keeps ended jobs for some minutes only.
        pairs = [line.strip().partition("|") for line in history.stdout.splitlines()]
        known = [Known(number, folder) for number, _, folder in pairs if number.isdigit()]
    return known[-1] if known else None


def _traces(found: Known, own: Record) -> str:
    """The folder of a job that is there: where it was asked for from another one, that one if it can be seen from here.

    What Slurm calls a job's folder is ours only where our record lies in it; a script may be submitted by hand.
    """
    try:
        there = read_record(Path(found.folder)) if found.folder.startswith("/") else None
    except (DataError, UsageError):
        there = None
    return there.output if there is not None and there.key == own.key else own.output


def submit(spec: JobSpec, script: str, tool: str) -> tuple[Record, bool]:
    """Hand a script to Slurm once: -> the record, and whether this call did it.

    The same job is never started twice: its key is part of its name in Slurm, and is looked for before sbatch is asked,
    which also finds a job whose client was killed before it heard the answer.

    Raises:
        OutsideError: Slurm is not there, does not answer, or refuses the job, with its words. UsageError: a secret is
        not set, or another job of this name in the same folder is still under way.
    """
    from filelock import FileLock

    missing = [name for name in spec.secrets if not os.environ.get(name)]
    if missing:
        raise UsageError(f"the secret {', '.join(missing)} is not set here", "export it, then submit again")
    folder = made_folder(spec.output)
    record = new_record(
        spec, "slurm", script=SCRIPT, log="%j.log", receipt="receipt-*.json" if spec.verify else None,
        extra={"tool": tool, "slurm_name": job_name(spec)},
    )  # fmt: skip
    with FileLock(folder / ".lock"):
        before = read_record(folder)
        if before is not None and before.key in spec.known_keys() and before.state == "submitted":
            return before, False
        if before is not None and before.key != record.key and before.job_id and not status(before).ended:
            raise UsageError(
                f"another job named {spec.name} (number {before.job_id}) is still under way in {folder}",
                f"give this one another --name, or end that: envforge job cancel {before.job_id}",
            )
        found = find_job(spec)
        if found is not None:
            record = submitted(replace(record, output=_traces(found, record)), found.number)
            write_record(record, folder)
            return record, False
        write_atomic(folder / SCRIPT, script, 0o755)
        keep_plan(spec)
        write_record(replace(record, state="submitting"))
        argv = ["sbatch", "--parsable", "--export=ALL", f"--chdir={folder}", str(folder / SCRIPT)]
        done = _slurm(argv, submit_environment(spec))
        number = re.match(r"(\d+)(;|$)", done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "")
        if done.returncode or number is None:
            refused = failure("Slurm did not take the job", done.stderr or done.stdout)
            if refused.id != "slurm-down":
                write_record(replace(record, state="written"))
            raise refused
        record = submitted(record, number[1])
        write_record(record)
    return record, True


def status(record: Record) -> JobState:
    """What Slurm says of a job: the controller first, then the accounting.

    Raises:
        OutsideError: the controller does not answer.
    """
    number = record.job_id or ""
    if not number:
        return JobState("", "lost", reason="it was never submitted")
    shown = _slurm(["scontrol", "show", "job", number, "--oneliner"])
    if shown.returncode == 0 and (pairs := dict(re.findall(r"(\w+)=(\S*)", shown.stdout))):
        return _state(
            number, pairs.get("JobState", ""), pairs.get("Reason", ""), pairs.get("ExitCode", ""),
            pairs.get("NodeList", ""), int(pairs.get("Restarts") or 0),
        )  # fmt: skip
    if "Invalid job id" not in shown.stderr:
        raise failure("Slurm does not say what became of the job", shown.stderr)
    try:
        history = _slurm(["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={number}",
                          "--format=State,Reason,ExitCode,NodeList,Restarts"])  # fmt: skip
    except OutsideError:
        history = None
    row = history.stdout.strip().splitlines()[-1:] if history is not None and history.returncode == 0 else []
    if not row or row[0].count("|") < 4:
        reason = "Slurm knows it no more, and there is no accounting to ask; its logs are in its folder"
        return JobState(number, "lost", "", reason)
    word, reason, code, nodes, restarts = row[0].split("|")[:5]
    return _state(number, word.split(" ")[0], reason, code, nodes, int(restarts) if restarts.isdigit() else 0)


def _state(number: str, word: str, reason: str, code: str, nodes: str, restarts: int) -> JobState:
    state = _STATES.get(word, "failed")
    exit_text, _, signal = code.partition(":")
    exit_code: int | None = None
    if state not in ("waiting", "running") and exit_text.isdigit():
        exit_code = int(exit_text) or (128 + int(signal) if signal.isdigit() and int(signal) else 0)
    return JobState(number, state, word, "" if reason in ("None", "(null)") else reason, exit_code,
                    "" if nodes in ("(null)", "None assigned") else nodes, restarts)  # fmt: skip


def cancel(record: Record) -> None:
    """End the job; one that has ended already is no failure.

    Raises:
        OutsideError: Slurm does not answer, or it is not ours to end.
    """
    if record.job_id:
        done = _slurm(["scancel", record.job_id])
        if done.returncode and "already completed" not in done.stderr and "Invalid job id" not in done.stderr:
            raise failure(f"job {record.job_id} was not cancelled", done.stderr)


def log_files(record: Record) -> list[Path]:
    """The job's own log first, then those of the tasks by rank."""
    folder = Path(record.output) if record.output else None
    if folder is None:
        shown = _slurm(["scontrol", "show", "job", record.job_id or "", "--oneliner"])
        named = re.search(r" StdOut=(.*?)(?: [A-Z]\w+=|$)", shown.stdout.strip())
        return [Path(named[1])] if named and Path(named[1]).is_file() else []
    ranks = folder.glob(f"{record.job_id}-rank*.log")
    return [
        *([own] if (own := folder / f"{record.job_id}.log").is_file() else []),
        *sorted(ranks, key=lambda path: int(re.sub(r"\D", "", path.stem.rpartition("rank")[2]) or 0)),
    ]
