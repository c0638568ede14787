"""envforge matrix: ask the matrix, check it, keep it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envforge.cli import target as t

if TYPE_CHECKING:
    from envforge.keep.update import PackageUpdate, Update
    from envforge.matrix.check import Finding
    from envforge.resolver.explain import Statement

JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="Ask the matrix, check it, keep it.", no_args_is_help=True)
    group.command("why")(why)
    group.command("check")(check)
    group.command("update")(update)
    group.command("add-evidence")(add_evidence)
    app.add_typer(group, name="matrix")


def _print_json(data: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps({"schema": 1, **data}, indent=1, ensure_ascii=False))


# --- why -----------------------------------------------------------------------------------------------------------


def why(
    pins: Annotated[list[str], typer.Argument(help="Pins such as torch==2.1.2 numpy==2.0.0.")],
    host: t.HostOption = None,
    fleet: t.FleetOption = None,
    driver: t.DriverOption = None,
    gpu: t.GpuOption = None,
    glibc: t.GlibcOption = None,
    arch: t.ArchOption = None,
    python: t.PythonOption = None,
    variant: t.VariantOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Do these pins go together (and on this host, where one is described)? Which rows decide, from which source?"""
    from envforge.errors import UsageError
    from envforge.resolver.check import judge
    from envforge.resolver.hosts import Host
    from envforge.resolver.request import parse_request
    from envforge.settings import layered_matrix

    wanted: dict[str, str] = {}
    for line in pins:
        request = parse_request(line)
        if request.pinned is None:
            raise UsageError(f"{line} is not an exact pin", "give exact versions, for example torch==2.1.2")
        if wanted.get(request.name, request.pinned) != request.pinned:
            raise UsageError(f"{request.name} is pinned twice", "give one version of each package")
        wanted[request.name] = request.pinned
        if request.local:
            variant = request.local
    targets = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant)
    described = bool(host or fleet or driver or gpu)
    # Without a described host the question is about the packages alone, whatever torch build they would use.
    hosts = targets.read() if described else (Host("any", None, glibc=glibc, arch=arch or "x86_64"),)
    chosen = None if variant == "auto" else variant
    verdict = judge(layered_matrix(), wanted, hosts, python, chosen, any_variant=not described)
    if json_:
        _print_json(
            {
                "ok": verdict.ok,
                "broken": [_statement(s) for s in verdict.broken],
                "missing": [_statement(s) for s in verdict.missing],
                "unknown": list(verdict.unknown),
                "decides": [_statement(s) for s in verdict.decides],
            }
        )
    else:
        known = "yes: nothing in the matrix stands against it" if not verdict.unknown else "not known:"
        typer.echo(known if verdict.ok else "no:")
        for statement in verdict.broken:
            _told(statement)
        if verdict.ok:
            for statement in verdict.decides:
                _told(statement, "rule, met: " if statement.kind == "rule" else "")
        for statement in verdict.missing:
            _told(statement, "also needed: ")
        for name in verdict.unknown:
            typer.echo(f"  not in the matrix: {name}")
    if not verdict.ok:
        raise typer.Exit(1)


def _statement(statement: Statement) -> dict[str, str]:
    return {"text": statement.text, "source": statement.source}


def _told(statement: Statement, before: str = "") -> None:
    typer.echo(f"  {before}{statement.text}\n    source: {statement.source or 'the question itself'}")


# --- check ---------------------------------------------------------------------------------------------------------


def check(
    json_: JsonOption = False,
    folder: Annotated[Path | None, typer.Option(help="Check this copy of matrix/data instead.")] = None,
    images: Annotated[bool, typer.Option("--images/--no-images", help="Resolve the ready-made stacks too.")] = True,
) -> None:
    """Hold the rows against the schema, each other, the releases and the ready-made stacks. Exit 1 with findings."""
    findings = _findings(folder, images)
    if json_:
        _print_json({"ok": not findings, "findings": [finding.to_json() for finding in findings]})
    else:
        for finding in findings:
            typer.echo(finding.text())
        typer.echo(f"{len(findings)} finding{'s' * (len(findings) != 1)}" if findings else "no findings")
    if findings:
        raise typer.Exit(1)


def _findings(folder: Path | None, images: bool) -> list[Finding]:
    from envforge.errors import DataError, UsageError
    from envforge.keep.receipts import check_receipts, receipt_folders
    from envforge.matrix.check import check_matrix
    from envforge.matrix.load import DATA, load_matrix
    from envforge.settings import load_settings

    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder} is no folder", "name a copy of matrix/data")
    layers = load_settings().layers
    findings = check_matrix(folder or DATA, layers)
    if any(finding.id == "load" for finding in findings):
        return findings  # nothing can be resolved with rows that do not load
    findings += check_receipts(receipt_folders(layers))
    findings += _diagnoses((folder or DATA) / "diagnoses.yaml")
    if images:
        from envforge.keep.images import check_images

        try:
            findings += check_images(load_matrix(folder or DATA, layers))
        except DataError as error:
            if not any(finding.id == "damaged" for finding in findings):
                raise
            typer.echo(f"the ready-made stacks were not resolved: {error.cause}", err=True)
    return findings


def _diagnoses(path: Path) -> list[Finding]:
    """The rules of `diagnose` lie beside the rows; their own reader says what is wrong with them."""
    import re

    from envforge.diagnose.rules import load_rules
    from envforge.errors import DataError
    from envforge.matrix.check import Finding

    try:
        load_rules(path)
    except DataError as error:
        found = []
        for fault in error.cause.split("\n"):
            match = re.match(r"[^:]*:(\d+): (.*)", fault)
            line, what = (int(match[1]), match[2]) if match else (1, fault)
            found.append(Finding("load", "matrix/data/diagnoses.yaml", line, "", what, "correct this line"))
        return found
    return []


# --- update --------------------------------------------------------------------------------------------------------


def update(
    package: Annotated[list[str] | None, typer.Argument(help="Packages of the matrix (default: all).")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write what changed; without it nothing changes.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Read the metadata of known releases again too.")] = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Take a harvest that lost known releases.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="The matrix to update: a folder with data/ and releases/.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Where metadata read so far is kept.")] = None,
    deadline: Annotated[float, typer.Option(metavar="SECONDS", help="Stop after this long.")] = 1800.0,
    json_: JsonOption = False,
) -> None:
    """Fetch new releases, say what they would change for users, and write them with --write.

    Exit 3 where the index failed or a harvest was refused for a package; the others are done.
    """
    from datetime import datetime, timezone

    from envforge.errors import UsageError
    from envforge.harvest import Index
    from envforge.keep import update as keeping
    from envforge.lock import read_pip_settings
    from envforge.matrix.load import DATA, load_matrix
    from envforge.matrix.releases import RELEASES

    data, releases = (folder / "data", folder / "releases") if folder else (DATA, RELEASES)
    if not (data / "policy.yaml").is_file() or not releases.is_dir():
        raise UsageError(f"{folder} holds no data/policy.yaml and releases/", "name a matrix folder, or leave it out")
    keeping.check_names(package or [])
    matrix = load_matrix(data)
    with Index(read_pip_settings(), deadline_s=deadline) as index:
        found = keeping.update(
            package or [],
            index,
            matrix,
            folder=releases,
            data=data,
            cache=cache,
            refresh=refresh,
            accept_loss=accept_loss,
            progress=_progress(),
        )
        asked = index.requests_made
    written: list[Path] = []
    if write:
        today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        written = keeping.write_update(found, today, folder=releases, data=data, whole=not package)
    if json_:
        _print_json(_update_json(found, written, asked))
    else:
        _print_update(found, written, asked, write)
    if found.failed:
        raise typer.Exit(3)


def _progress() -> Any:
    import sys

    if not sys.stderr.isatty():
        return None

    def show(name: str, done: int, of: int) -> None:
        print(f"\r{name}: {done} of {of} releases read", end="" if done < of else "\n", file=sys.stderr, flush=True)

    return show


def _update_json(found: Update, written: list[Path], asked: int) -> dict[str, Any]:
    return {
        "packages": [_package_json(one) for one in found.packages],
        "users": list(found.images),
        "findings": [finding.to_json() for finding in found.findings],
        "floors": [{"transformers": row.version, row.package: f">={row.minimum}"} for row in found.floors],
        "notes": list(found.notes),
        "written": [path.name for path in written],
        "requests": asked,
    }


def _package_json(one: PackageUpdate) -> dict[str, Any]:
    error = {"id": one.error.id, "text": one.error.cause} if one.error else None
    return {"name": one.name, "changed": one.changed, "news": list(one.lines), "error": error}


def _print_update(found: Update, written: list[Path], asked: int, write: bool) -> None:
    for one in found.packages:
        for line in one.lines:
            typer.echo(line)
    quiet = [one.name for one in found.packages if not one.lines and not one.error]
    if quiet:
        typer.echo(f"nothing new: {', '.join(quiet)}")
    if found.changed:
        typer.echo("for users of the ready-made stacks:")
        for line in found.images or ("nothing changes",):
            typer.echo(f"  {line}")
    for row in found.floors:
        typer.echo(f"new row, read from the wheel: {row.text}")
    if found.findings:
        typer.echo("the new releases need a hand:")
        for finding in found.findings:
            typer.echo(f"  {finding.text()}")
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    for one in found.failed:
        assert one.error is not None
        typer.echo(f"{one.name}: left as it is: {one.error.cause}", err=True)
        if one.error.hint:
            typer.echo(f"  hint: {one.error.hint}", err=True)
    for path in written:
        typer.echo(f"written: {path.name}", err=True)
    if found.changed and not write:
        typer.echo("nothing was written; add --write", err=True)
    typer.echo(f"{asked} requests to the index", err=True)


# --- evidence ------------------------------------------------------------------------------------------------------


def add_evidence(
    receipt: Annotated[list[Path], typer.Argument(help="Receipts that verify --json wrote.")],
    folder: Annotated[Path | None, typer.Option(help="Where to keep them (default: beside the matrix).")] = None,
    json_: JsonOption = False,
) -> None:
    """Keep receipts as evidence: versions, variant, capability and outcome, and nothing about whose machine it was."""
    from envforge.errors import DataError
    from envforge.keep.receipts import add_receipt, default_folder
    from envforge.matrix.evidence import MAX_BYTES, read_receipt
    from envforge.matrix.strictyaml import read_text
    from envforge.settings import user_folder

    place = folder or default_folder(user_folder() / "matrix.d")
    kept, faults = [], []
    for path in receipt:
        try:
            kept.append(read_receipt(read_text(path, max_bytes=MAX_BYTES), path.name))
        except DataError as error:
            faults.append(error)
    if faults:  # none is kept unless all are good
        raise DataError("\n".join(error.cause for error in faults), faults[0].hint)
    rows = []
    for one in kept:
        file, new = add_receipt(one, place)
        rows.append({"id": one.id, "file": str(file), "new": new, "passed": one.passed, "grade": one.grade})
    if json_:
        _print_json({"receipts": rows})
        return
    for row in rows:
        state = "passed" if row["passed"] else "failed"
        typer.echo(f"{row['id']}: {row['grade']} proof that {state}, {'kept' if row['new'] else 'already there'}")
    typer.echo(f"in {place}", err=True)
