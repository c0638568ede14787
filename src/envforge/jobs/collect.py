"""What came of many jobs, in one table: a row for each node's proof, each refused node, and each job without either."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from envforge.errors import EnvforgeError, UsageError
from envforge.jobs.follow import JobState, bring_home, follower, preflights, read_json, receipts
from envforge.jobs.record import Record, find_records

Found = tuple[str, str]  # diagnose's first finding: its id and title


class Explain(Protocol):
    """Asks diagnose: of a receipt that failed, and of all that is known of a job."""

    def receipt(self, receipt: Mapping[str, Any]) -> Found | None: ...
    def job(self, record: Record) -> Found | None: ...


FAILED, OPEN, PASSED = "failed", "open", "passed"
_ORDER = (FAILED, OPEN, PASSED)


@dataclass(frozen=True, slots=True)
class Row:
    """One line. result: `failed`, `open` (waiting, running, nothing to tell yet) or `passed`. digest: of the image that
    the receipt proves, else of the job's. finding: what diagnose made of a failed one: of its own receipt, else of the
    job's logs."""

    result: str
    job: str
    job_id: str
    node: str
    state: str
    exit_code: int | None
    grade: str
    digest: str
    seconds: float | None
    detail: str
    finding: str = ""
    title: str = ""


def collect(places: Iterable[Path], explain: Explain) -> list[Row]:
    """Rows of all jobs in these folders, failed ones first, then by job and node.

    Raises:
        UsageError: a place that holds neither jobs nor receipts.
    """
    rows: list[Row] = []
    for place in places:
        found = find_records(place)
        loose = [] if found else list(_loose(place, explain))
        if not found and not loose:
            raise UsageError(f"{place} holds no job and no receipt", "name a job's folder, or the folder of several")
        rows += [row for record in found for row in rows_of(record, explain)]
        rows += loose
    return sorted(set(rows), key=lambda row: (_ORDER.index(row.result), row.job, row.node, row.job_id))


def rows_of(record: Record, explain: Explain) -> list[Row]:
    """The rows of one job."""
    try:
        state = follower(record).status(record)
        bring_home(record, state)
    except EnvforgeError as error:
        state = JobState(record.job_id or "", "unknown", reason=error.cause.splitlines()[0])
    base = Row(
        OPEN, record.name, state.job_id or record.job_id or "", state.nodes, state.state, state.exit_code, "",
        record.digest or "", None, state.reason,
    )  # fmt: skip
    rows = [_refused(base, row) for row in preflights(record) if row.get("ok") is False]
    rows += [_proof(base, row, node, record, explain) for node, row in receipts(record)]
    # A scheduler that has forgotten a job, or is not there, says nothing about it.
    ends = {"done": PASSED, "failed": FAILED, "cancelled": FAILED, "timeout": FAILED}.get(state.state, OPEN)
    if not rows:
        if record.verify and state.state in ("done", "lost"):
            base = replace(base, detail="it ended and left no receipt")
            ends = FAILED
        rows = [replace(base, result=ends)]
    elif ends == FAILED and all(row.result == PASSED for row in rows):
        rows.append(replace(base, result=FAILED))
    # A receipt's own finding says more than all logs together; they are read only where one has none.
    open_ones = [row for row in rows if row.result == FAILED and not row.finding]
    found = explain.job(record) if open_ones else None
    return [replace(row, finding=found[0], title=found[1]) if found and row in open_ones else row for row in rows]


def _refused(base: Row, row: Mapping[str, Any]) -> Row:
    cause = row.get("cause") or {}
    detail = f"refused: {cause.get('id')}: {cause.get('text')}"
    return replace(base, result=FAILED, node=str(row.get("node") or ""), detail=detail)


def _proof(base: Row, receipt: Mapping[str, Any], node: str, record: Record | None, explain: Explain) -> Row:
    passed = receipt.get("passed") is True
    found = None if passed else explain.receipt(receipt)
    first = receipt.get("first_failure") or {}
    detail = "" if passed else f"{first.get('layer')}, {first.get('check')}: {first.get('text')}"
    digest = str(receipt.get("image_digest") or "")
    if record is not None and record.digest and digest and digest != record.digest:
        passed, found, detail = False, None, f"the receipt is of another image than the job's {record.digest}"
    seconds = receipt.get("seconds")
    return replace(
        base,
        result=PASSED if passed else FAILED,
        node=node,
        grade=str(receipt.get("grade") or ""),
        digest=digest or base.digest,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        detail=detail,
        finding=found[0] if found else "",
        title=found[1] if found else "",
    )


def _loose(place: Path, explain: Explain) -> Iterable[Row]:
    """Receipts that lie about without a job."""
    paths = [place] if place.is_file() else sorted(place.glob("*.json")) if place.is_dir() else []
    for path in paths:
        data = read_json(path)
        if data is not None and data.get("kind") == "receipt":
            empty = Row(OPEN, path.stem, "", "", "", None, "", "", None, "")
            yield _proof(empty, data, str((data.get("host") or {}).get("name") or ""), None, explain)


def to_csv(rows: Iterable[Row]) -> str:
    """With a header; a cell that a spreadsheet would run as a formula begins with a quote."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = {key: "" if value is None else str(value) for key, value in asdict(row).items()}
        writer.writerow({key: f"'{cell}" if cell[:1] in ("=", "+", "@", "-") else cell for key, cell in cells.items()})
    return out.getvalue()


def to_json(rows: Iterable[Row]) -> dict[str, Any]:
    """The documented shape."""
    return {"schema": 1, "rows": [asdict(row) for row in rows]}
