"""What became of a job: one shape for every scheduler, and which module answers for which."""

from __future__ import annotations

import contextlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from envforge.errors import EnvforgeError, UsageError
from envforge.jobs.record import FOLDER, Record, find_records, read_record

FOLLOWERS = {"slurm": "envforge.jobs.scheduler", "kubernetes": "envforge.jobs.kubernetes"}


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as its scheduler tells it.

    state: `waiting`, `running`, `done`, `failed`, `cancelled`, `timeout`, `lost`. word: the scheduler's own. exit_code:
    of the job, None while it has none. restarts: how often it went back to the queue.
    """

    job_id: str
    state: str
    word: str = ""
    reason: str = ""
    exit_code: int | None = None
    nodes: str = ""
    restarts: int = 0

    @property
    def ended(self) -> bool:
        """Nothing more will happen."""
        return self.state not in ("waiting", "running")


class Follower(Protocol):
    """What a back end's module offers. Each raises OutsideError where the scheduler does not answer."""

    def status(self, record: Record) -> JobState: ...
    def cancel(self, record: Record) -> None: ...
    def log_files(self, record: Record) -> list[Path]: ...


def follower(record: Record) -> Follower:
    """The module that knows this job's scheduler.

    Raises:
        UsageError: none does.
    """
    if record.backend not in FOLLOWERS:
        raise UsageError(f"job {record.name}: no scheduler is named {record.backend[:40]!r}")
    return cast(Follower, importlib.import_module(FOLLOWERS[record.backend]))


def find_record(word: str, root: Path | None = None) -> Record:
    """A job by its folder, its name (in `envforge-jobs` of this folder), or the scheduler's number.

    Raises:
        UsageError: there is none, with those that there are.
    """
    found = read_record(Path(word)) if "/" in word or Path(word).is_dir() else None
    if found is not None:
        return found
    known = find_records(root or Path(FOLDER))
    mine = [record for record in known if word in (record.name, record.job_id)]
    if mine:
        return mine[0]
    if word.isdigit():
        return Record("slurm", word, "", "submitted", word)
    names = ", ".join(sorted({record.name for record in known})) or "none"
    raise UsageError(f"no job {word[:80]!r} was submitted from here", f"name its folder; known here: {names}")


def preflights(record: Record) -> list[dict[str, Any]]:
    """What the preflight said on each node of the job's last start, refused nodes first."""
    rows = _read(Path(record.output), f"preflight-{record.job_id}-*.json") if record.output else []
    return sorted(rows, key=lambda row: (row.get("ok") is not False, str(row.get("node"))))


def receipts(record: Record) -> list[tuple[str, dict[str, Any]]]:
    """The receipts that a `--verify` job brought home, each with its node."""
    paths = sorted(Path(record.output).glob("receipt-*.json")) if record.output else []
    return [(path.stem.removeprefix("receipt-"), row) for path in paths if (row := read_json(path)) is not None]


def bring_home(record: Record, state: JobState) -> None:
    """Fetch the receipts of an ended proof that its folder cannot have yet: pods tell theirs at the end of logs."""
    if record.backend == "kubernetes" and record.verify and record.output and state.ended and not receipts(record):
        with contextlib.suppress(EnvforgeError):
            follower(record).log_files(record)


def _read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob(pattern)) if (row := read_json(path)) is not None]


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where it is not there or holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
