"""What diagnose does with a whole job: all its traces read as one log, or packed to be sent."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envforge.diagnose import Report
    from envforge.diagnose.model import Finding
    from envforge.jobs.gather import Gathered
    from envforge.resolver.hosts import Host

FOREIGN = (AttributeError, KeyError, TypeError, ValueError)  # a file that is called a receipt and is none of ours


def find_job(word: str) -> Gathered:
    """A job by its id, name, folder or record file, with everything that is known of it.

    Raises:
        UsageError: there is no such job.
    """
    from envforge.jobs.follow import find_record
    from envforge.jobs.gather import gather
    from envforge.jobs.record import RECORD

    path = Path(word)
    return gather(find_record(str(path.parent.absolute()) if path.name == RECORD and path.is_file() else word))


def diagnosed(job: Gathered, driver: str | None, no_driver: bool, host: Host | None) -> Report:
    """The logs of all ranks, what the preflight said, and the accounting, judged together."""
    import io
    from dataclasses import replace

    from envforge.diagnose import diagnose, open_log
    from envforge.diagnose.joined import joined, located
    from envforge.jobs.follow import receipts
    from envforge.jobs.gather import ACCOUNTING
    from envforge.jobs.model import PREFLIGHT_EXIT
    from envforge.verify.explain import log_of

    sources: list[Any] = [(path.name, open_log(path)) for path in job.logs if path.is_file()]
    proofs = [(f"receipt-{node}.json", row) for node, row in receipts(job.record) if row.get("passed") is False]
    for name, row in proofs:
        with contextlib.suppress(*FOREIGN):
            sources.append((name, io.BytesIO(log_of(row).encode())))
    words = job.accounting
    if job.state is not None and job.state.exit_code == PREFLIGHT_EXIT:
        words += f"exit code {PREFLIGHT_EXIT}\n"
    sources.append((ACCOUNTING, io.BytesIO(words.encode())))
    if driver is None and not no_driver and host is None:
        driver = _driver(job)
    whole, stream = joined(sources)
    report = located(diagnose(stream, driver=driver, host=host, no_driver=no_driver), whole)
    seen = [finding for name, row in proofs for finding in _observed(name, row)]
    certain = {finding.id: finding for finding in reversed(seen)}
    rest = tuple(finding for finding in report.findings if finding.id not in certain)
    return replace(report, findings=(*reversed(certain.values()), *rest)) if certain else report


def _observed(name: str, receipt: dict[str, Any]) -> list[Finding]:
    """What the checks of a receipt measured themselves: certain, whatever the logs say."""
    from envforge.cli.findings import observed
    from envforge.diagnose.model import Finding, Hit

    found = []
    with contextlib.suppress(*FOREIGN):
        for row in observed(receipt):
            (seen,) = row["evidence"]
            evidence = (Hit(1, f"{seen['check']}: {seen['text']}", file=name),)
            lists = {key: tuple(row[key]) for key in ("fixes", "next", "consequence_of")}
            found.append(Finding(**{**row, **lists, "evidence": evidence}))
    return found


def first_finding(receipt: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is most likely wrong where a receipt failed; None where it passed, or tells nothing."""
    from envforge.cli.findings import explain

    with contextlib.suppress(*FOREIGN):
        found = explain(dict(receipt)).get("findings") or ()
        return next((row for row in found if {"id", "title", "cause", "fixes"} <= row.keys()), None)
    return None


def _driver(job: Gathered) -> str | None:
    """The oldest driver that the preflights of the job's nodes saw."""
    import json
    import re

    from envforge.resolver.hosts import key

    found = []
    for path in job.files:
        if path.name.startswith("preflight-"):
            try:
                said = json.loads(path.read_text(encoding="utf-8")).get("driver")
            except (OSError, ValueError, AttributeError):
                continue
            if isinstance(said, str) and re.fullmatch(r"\d{3,4}(\.\d{1,3}){1,2}", said):
                found.append(said)
    return min(found, key=key, default=None)


def bundle(
    target: Path, report: Report, files: Sequence[tuple[str, Path]], texts: dict[str, str], secrets: Sequence[str] = ()
) -> dict[str, int]:
    """Write the redacted archive -> how much of each kind was taken out.

    Raises:
        UsageError, DiskFullError: it cannot be written.
    """
    import json
    import os
    from importlib.metadata import PackageNotFoundError, version

    from envforge.diagnose.archive import make_archive
    from envforge.diagnose.render import text
    from envforge.files import write_atomic
    from envforge.redact import Redactor, secret_values

    try:
        own = version("envforge")
    except PackageNotFoundError:
        own = "unknown"
    texts = {
        **texts,
        "findings.txt": text(report),
        "findings.json": json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n",
        "envforge-version.txt": own + "\n",
    }
    data, counts = make_archive(texts, files, Redactor(secret_values(os.environ, secrets), _people()))
    write_atomic(target, data)
    return counts


def _people() -> dict[str, str]:
    """Whoever runs this, by login name and by the name of the home folder."""
    import contextlib
    import getpass

    names = set()
    with contextlib.suppress(KeyError, OSError):  # a user id without a name
        names.add(getpass.getuser())
    with contextlib.suppress(RuntimeError):
        names.add(Path.home().name)
    return dict.fromkeys(sorted(filter(None, names)), "user")
