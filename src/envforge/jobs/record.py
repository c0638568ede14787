"""What is remembered of a job on the side that submits: `job.json` in its output folder.

Written before the scheduler is asked (`submitting`) and again with its answer (`submitted`), so that a client that was
killed in between knows that it has to look before it asks again.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from envforge.errors import DataError, UsageError
from envforge.files import write_atomic
from envforge.jobs.model import JobSpec

RECORD = "job.json"
FOLDER = "envforge-jobs"  # where jobs go that name no folder of their own: envforge-jobs/NAME


@dataclass(frozen=True, slots=True)
class Record:
    """One job as submitted.

    state: `written` (script only), `submitting`, `submitted`. job_id: the scheduler's word for it. script: file name in
    the output folder. logs, receipt: paths, `%j` standing for the job id. nodes: how many.
    """

    backend: str  # slurm, kubernetes
    name: str
    key: str
    state: str = "written"
    job_id: str | None = None
    image: str = ""
    digest: str | None = None
    plan: str | None = None  # hash of the plan's JSON
    nodes: int = 1
    verify: bool = False
    output: str = ""
    script: str = ""
    log: str = ""
    receipt: str | None = None
    submitted_at: str | None = None  # UTC, ISO 8601
    extra: Mapping[str, Any] = field(default_factory=dict)  # a back end's own: namespace, cluster, tool

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"schema": 1, **asdict(self)}


def new_record(spec: JobSpec, backend: str, **fields: Any) -> Record:
    """The record of a job that nobody was asked for yet."""
    if spec.secrets:  # their names: what must not be sent when somebody packs the logs
        fields["extra"] = {**fields.get("extra", {}), "secrets": list(spec.secrets)}
    return Record(
        backend,
        spec.name,
        spec.key(),
        image=spec.image or spec.image_file or "",
        digest=spec.digest,
        plan=spec.to_json()["plan"],
        nodes=spec.nodes,
        verify=spec.verify,
        output=spec.output,
        **fields,
    )


def submitted(record: Record, job_id: str) -> Record:
    """The record with the scheduler's answer."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return replace(record, state="submitted", job_id=job_id, submitted_at=now)


def made_folder(output: str) -> Path:
    """The job's folder, made where it is not there yet.

    Raises:
        UsageError: it cannot be made.
    """
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the job's folder {folder}: {error.strerror}", "name another: --output"
        ) from error
    return folder


def write_record(record: Record, folder: Path | None = None) -> Path:
    """Keep it in the job's output folder, or in another one that points to it; made when needed.

    Raises:
        UsageError, DiskFullError: it cannot be written.
    """
    folder = made_folder(str(folder or record.output))
    write_atomic(folder / RECORD, json.dumps(record.to_json(), indent=1, ensure_ascii=False) + "\n")
    return folder / RECORD


def write_unasked(record: Record) -> None:
    """Keep the record of a job that is only written; one of the same job that was submitted already stays.

    Raises:
        UsageError, DiskFullError: it cannot be written.
    """
    with contextlib.suppress(DataError):  # a damaged one is written anew
        before = read_record(Path(record.output))
        if before is not None and before.key == record.key and before.job_id:
            return
    write_record(record)


def keep_plan(spec: JobSpec) -> None:
    """The plan of the job's image beside its record, for whoever asks later why it failed."""
    if spec.plan is not None:
        text = json.dumps(dict(spec.plan), sort_keys=True, indent=1, ensure_ascii=False) + "\n"
        write_atomic(Path(spec.output) / "plan.json", text)


def read_record(folder: Path) -> Record | None:
    """The record in a job's output folder, None when there is none.

    Raises:
        DataError: it is damaged. UsageError: it cannot be read.
    """
    path = folder / RECORD
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != 1:
            raise ValueError("unknown schema")
        return Record(**data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no record of a job ({error})", "remove it if the job is none of yours") from error


def find_records(root: Path) -> list[Record]:
    """The records in a folder of jobs (`envforge-jobs`) or in a job's own folder; damaged ones are left out."""
    found = []
    for path in [root / RECORD, *sorted(root.glob(f"*/{RECORD}"))]:
        try:
            record = read_record(path.parent)
        except (DataError, UsageError):
            continue
        if record is not None:
            found.append(record)
    return found
