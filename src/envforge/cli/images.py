"""envforge images: what was built, what suits a host, what may go; taking over and handing on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envforge.cli import target as t

if TYPE_CHECKING:
    from envforge.image.engines import ContainerEngine
    from envforge.image.library import Book

EngineOption = Annotated[str, typer.Option(help="auto, docker, podman or buildah.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(
        help="The images that were built: list, find, adopt, attach, export, prune.", no_args_is_help=True
    )
    for command in (list_, find, adopt, attach, export, prune):
        group.command(command.__name__.rstrip("_"))(command)
    app.add_typer(group, name="images")


def list_(engine: EngineOption = "auto", json_: JsonOption = False) -> None:
    """All images of ours in the engine, newest first."""
    import json

    books = _books(_engine(engine))
    if json_:
        typer.echo(json.dumps({"schema": 1, "images": [book.to_json() for book in books]}, indent=1))
        return
    for book in books:
        typer.echo(_line(book))
    if not books:
        print("no image of envforge is in this engine", file=sys.stderr)


def find(
    host: t.HostOption = None,
    fleet: t.FleetOption = None,
    driver: t.DriverOption = None,
    gpu: t.GpuOption = None,
    arch: t.ArchOption = None,
    registry: Annotated[str | None, typer.Option(help="Look there instead: registry.example/team.")] = None,
    stack: Annotated[list[str] | None, typer.Option(help="Stacks to look for in the registry.")] = None,
    engine: EngineOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Which built image suits these hosts? Exit 1 when none does."""
    import json

    from envforge.errors import DataError
    from envforge.image.library import in_registry_books, plan_of, unsuited
    from envforge.settings import layered_matrix
    from envforge.spec import spec_names

    hosts = t.Targets(host, fleet, driver, gpu, None, arch).read()
    matrix = layered_matrix()
    rows = []
    fits = 0
    books = in_registry_books(registry, stack or spec_names()) if registry else _books(_engine(engine))
    for book in books:
        try:
            plan = plan_of(book.image.labels, book.name or book.image.id)
        except DataError as error:
            print(f"passed over: {error.cause}", file=sys.stderr)  # one damaged label must not hide the others
            continue
        if book.name is None or plan is None:
            continue
        why = [
            {"host": one.name, "text": text} for one in hosts for text in unsuited(plan, book.image.labels, one, matrix)
        ]
        fits += not why
        rows.append((book, why))
    rows.sort(key=lambda row: bool(row[1]))  # what suits first, newest first in each half
    if json_:
        found = [{**book.to_json(), "suits": not why, "why_not": why} for book, why in rows]
        typer.echo(json.dumps({"schema": 1, "images": found}, indent=1))
    else:
        for book, why in rows:
            typer.echo(f"{'suits' if not why else 'no   '}  {_line(book)}")
            for reason in why[:3]:
                typer.echo(f"         {reason['host']}: {reason['text']}")
    if not fits:
        print("none of these images suits; envforge build makes one", file=sys.stderr)
        raise typer.Exit(1)


def adopt(
    reference: Annotated[str, typer.Argument(help="The image, in the engine or in its registry.")],
    project: Annotated[Path | None, typer.Argument(help="The project whose plan it shall be.")] = None,
    engine: EngineOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Take over an image that was built elsewhere, if it is what a plan says."""
    import json

    from envforge.cli.outcome import write_build
    from envforge.cli.stages import stage_printer
    from envforge.errors import UsageError
    from envforge.image.adopt import adopt as take
    from envforge.project import read_plan

    reference = _checked(reference)
    plan = read_plan(project) if project is not None else None
    if project is not None and plan is None:
        raise UsageError(f"{project} holds no plan.json", f"make one: envforge resolve {project}")
    chosen = _engine(engine)
    with stage_printer(sys.stderr) as progress:
        taken = take(chosen, reference, plan, progress=progress)
    result = taken.result(chosen.name, reference)
    if project is not None:
        write_build(project, result, taken.plan.hash(), taken.image.labels.get("envforge.lock-hash"))
    if json_:
        typer.echo(json.dumps(result.to_json(), indent=1))
        return
    typer.echo(f"{result.reference}\n  is what the plan says: python {taken.plan.python}, {len(taken.plan.pins)} pins")
    if taken.name is None:
        typer.echo("  it carries no plan of its own, so build does not find it; build.json names it")
    if taken.proof is not None:
        typer.echo(f"  its receipt says that it was proven ({taken.proof['grade']}, {taken.proof.get('started')})")
    else:
        typer.echo("  it was not proven here; envforge verify does that inside it")


def attach(
    reference: Annotated[str, typer.Argument(help="The image in its registry.")],
    receipt: Annotated[Path, typer.Argument(help="A receipt that a job's proof brought home.")],
    json_: JsonOption = False,
) -> None:
    """Put a receipt beside its image in the registry. Exit 1: it did not pass, or is of another image."""
    import json

    from envforge.cli.verify import read
    from envforge.image.proofs import put_earned

    proven = read(receipt)
    remote, artifact = put_earned(_checked(reference), proven)
    image = remote.reference.at(remote.digest)
    if json_:
        typer.echo(json.dumps({"schema": 1, "image": image, "proof": artifact, "grade": proven["grade"]}, indent=1))
    else:
        typer.echo(f"{image}\n  has the receipt of its {proven['grade']} proof beside it now")


def export(
    reference: Annotated[str, typer.Argument(help="The image, in the engine or in its registry.")],
    to: Annotated[str, typer.Option(help="oci-archive, sqsh (enroot, pyxis) or sif (apptainer).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the file.")] = Path(),
    engine: EngineOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Convert a built image into one file, named by the image's id."""
    import json

    from envforge.cli.stages import stage_printer
    from envforge.image.export import export as convert

    reference = _checked(reference)
    chosen = _engine(engine)
    with stage_printer(sys.stderr) as progress:
        image = chosen.inspect(reference) or chosen.pull(reference, progress)
        done = convert(chosen, image, to, output, progress)
    if json_:
        data = {"schema": 1, "path": str(done.path), "digest": image.id, "size": done.size, "reused": done.reused}
        typer.echo(json.dumps(data, indent=1))
    else:
        typer.echo(done.path)


def prune(
    every: Annotated[
        bool, typer.Option("--all", help="The newest of each stack too, where no project uses it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    engine: EngineOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Remove images that no project and no other name uses."""
    import contextlib
    import json

    from envforge.errors import EngineError, UsageError
    from envforge.image.library import unused
    from envforge.image.state import being_built, folder_of, state_root

    chosen = _engine(engine)
    root = state_root()
    books = _books(chosen)
    found = [row for row in unused(books, every) if not being_built(folder_of(root, row.book.address))]
    size = sum(row.book.image.size for row in found)
    for row in found:
        print(f"{_line(row.book)}\n         {row.why}", file=sys.stderr)
    if found and not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"{len(found)} images would be removed, and nobody can be asked", "say --yes")
        typer.confirm(f"Remove these {len(found)} images ({size / 1e9:.1f} GB at most)?", abort=True, err=True)
    gone, left = [], []
    for row in found:
        try:
            for name in row.book.image.names or (row.book.image.id,):
                chosen.remove(name)
            gone.append(row.book.name or row.book.image.id)
        except EngineError as error:
            if error.id != "in-use":
                raise
            left.append(row.book.name or row.book.image.id)
            print(f"kept: {error.cause}", file=sys.stderr)
    if json_:
        typer.echo(json.dumps({"schema": 1, "removed": gone, "kept": left}, indent=1))
    else:
        with contextlib.suppress(BrokenPipeError):
            typer.echo("\n".join(f"removed {name}" for name in gone) if gone else "nothing to remove")


def _engine(name: str) -> ContainerEngine:
    from envforge.image.engines import choose_engine, container_engine

    return container_engine(choose_engine(name))


def _checked(reference: str) -> str:
    """An image as people name it: a reference, or an id.

    Raises:
        DataError: neither.
    """
    import re

    from envforge.image.registry import parse_reference

    if not re.fullmatch(r"(sha256:)?[0-9a-f]{12,64}", reference):
        parse_reference(reference)
    return reference


def _books(engine: ContainerEngine) -> tuple[Book, ...]:
    from envforge.image.library import shelve
    from envforge.image.state import state_root

    return shelve(engine.images(), state_root())


def _line(book: Book) -> str:
    data = book.to_json()
    floor = f", driver {data['driver_floor']} or newer" if data["driver_floor"] else ""
    proof = f", proof {data['proof']}" if data["proof"] else ""
    name = data["reference"] or data["digest"]
    return f"{name}  {data['size'] / 1e6:,.0f} MB, python {data['python']}, {data['variant']}{floor}{proof}"
