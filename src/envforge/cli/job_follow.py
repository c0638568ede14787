"""envforge job status, logs, cancel: what became of a job, whichever scheduler has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from envforge.jobs.follow import JobState
    from envforge.jobs.record import Record

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name, number or output folder of a job.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def register(job: typer.Typer) -> None:
    """Add the commands."""
    job.command("status")(status)
    job.command("logs")(logs)
    job.command("cancel")(cancel)


def describe(record: Record, state: JobState) -> dict[str, Any]:
    """The answer of `job status --json`."""
    from envforge.cli.job_report import first_finding
    from envforge.jobs.follow import preflights, receipts

    refused = [row for row in preflights(record) if row.get("ok") is False]
    proofs = []
    for node, receipt in receipts(record):
        found = first_finding(receipt)
        why = {key: found[key] for key in ("id", "title", "cause", "fixes")} if found else None
        row = {key: receipt.get(key) for key in ("passed", "grade")}
        proofs.append({"node": node, **row, "digest": receipt.get("image_digest"), "finding": why})
    return {
        "schema": 1,
        "name": record.name,
        "backend": record.backend,
        "job_id": state.job_id or None,
        "state": state.state,
        "word": state.word,
        "reason": state.reason,
        "exit_code": state.exit_code,
        "nodes": state.nodes,
        "restarts": state.restarts,
        "output": record.output,
        "refused": [{"node": row.get("node"), **(row.get("cause") or {})} for row in refused],
        "receipts": proofs,
    }


def status(job: JobArgument, json_: JsonOption = False) -> None:
    """What became of a job. Exit 1: it failed; 3: its scheduler lost it or does not answer; 86: a node was refused."""
    import json
    import shlex

    from envforge.jobs.follow import bring_home, find_record, follower
    from envforge.jobs.model import PREFLIGHT_EXIT

    record = find_record(job)
    state = follower(record).status(record)
    bring_home(record, state)
    row = describe(record, state)
    if json_:
        typer.echo(json.dumps(row, indent=1, ensure_ascii=False))
    else:
        code = "" if state.exit_code is None else f", exit code {state.exit_code}"
        again = f", back in the queue {state.restarts} times" if state.restarts else ""
        why = f" ({state.reason})" if state.reason else ""
        typer.echo(
            f"{record.name} {state.job_id}: {state.state}{why}{code}{again}"
            + (f" on {state.nodes}" if state.nodes else "")
        )
        for refused in row["refused"]:
            typer.echo(f"  {refused['node']} was refused: {refused.get('text')}\n  fix: {refused.get('fix')}")
        for proof in row["receipts"]:
            word = "passed" if proof["passed"] else "failed"
            image = proof["digest"] or "an image without digest"
            typer.echo(f"  proof {word} ({proof['grade']}) on {proof['node']} for {image}")
            _tell_finding(proof["finding"])
        if state.state == "failed" and not row["refused"] and not any(proof["finding"] for proof in row["receipts"]):
            typer.echo(f"  why: envforge diagnose --job {shlex.quote(job)}")
    if state.state == "lost":
        raise typer.Exit(3)
    if state.exit_code == PREFLIGHT_EXIT:
        raise typer.Exit(PREFLIGHT_EXIT)
    if state.ended and state.state != "done":
        raise typer.Exit(1)


def _tell_finding(found: dict[str, Any] | None, err: bool = False) -> None:
    if found is not None:
        typer.echo(f"  {found['id']}: {found['title']}\n  {found['cause']}", err=err)
        for fix in found["fixes"][:1]:
            typer.echo(f"  fix: {fix}", err=err)


def logs(
    job: JobArgument,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this task's.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
) -> None:
    """Print the logs of a job: its own first, then each task's."""
    import sys
    import time

    from envforge.cli.job_report import first_finding
    from envforge.errors import OutsideError
    from envforge.jobs.follow import find_record, follower, receipts

    record = find_record(job)
    back = follower(record)
    told: dict[Any, int] = {}
    while True:
        ended = not follow or back.status(record).ended
        paths = [path for path in back.log_files(record) if rank is None or path.stem.endswith(f"rank{rank}")]
        for path in paths:
            with path.open("rb") as file:
                file.seek(told.get(path, 0))
                text = file.read()
            if path not in told and len(paths) > 1:
                typer.echo(f"== {path.name}", err=True)
            told[path] = told.get(path, 0) + len(text)
            sys.stdout.write(text.decode("utf-8", "replace"))
            sys.stdout.flush()
        if ended:
            break
        time.sleep(2)
    if not told:
        raise OutsideError(
            f"job {record.name} has no logs yet", "envforge job status tells whether it runs", id="no-logs"
        )
    for node, receipt in receipts(record):
        if found := first_finding(receipt):
            typer.echo(f"== the proof failed on {node}", err=True)
            _tell_finding(found, err=True)


def cancel(job: JobArgument, json_: JsonOption = False) -> None:
    """End a job. One that has ended already stays as it is."""
    import json

    from envforge.jobs.follow import find_record, follower

    record = find_record(job)
    back = follower(record)
    back.cancel(record)
    state = back.status(record)
    if json_:
        typer.echo(json.dumps(describe(record, state), indent=1, ensure_ascii=False))
    else:
        typer.echo(f"{record.name} {state.job_id}: {state.word.lower() or state.state}")
