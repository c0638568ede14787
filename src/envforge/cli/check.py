"""envforge check: does what I have run on these hosts, and if not, why; per kind of host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envforge.cli import target as t

if TYPE_CHECKING:
    from envforge.installed import Installed


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)


def check(
    project: Annotated[Path | None, typer.Argument(help="A project folder, or a folder that build made.")] = None,
    requirement: Annotated[list[Path] | None, typer.Option("--requirement", "-r", help="Exact pins.")] = None,
    env: Annotated[Path | None, typer.Option("--env", help="The prefix of an environment, whoever built it.")] = None,
    host: t.HostOption = None,
    fleet: t.FleetOption = None,
    driver: t.DriverOption = None,
    gpu: t.GpuOption = None,
    glibc: t.GlibcOption = None,
    arch: t.ArchOption = None,
    python: t.PythonOption = None,
    variant: t.VariantOption = "auto",
    exclude: Annotated[list[str] | None, typer.Option(help="Leave this host out of the fleet.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Does what I have run there? Exit 1 when it does not on some host."""
    import json

    from envforge.errors import UsageError
    from envforge.resolver.check import judge
    from envforge.resolver.fleet import kinds
    from envforge.settings import layered_matrix

    given = [x for x in (project, requirement, env) if x]
    if len(given) != 1:
        raise UsageError("check looks at one thing", "give a project folder, -r FILE, or --env PREFIX")
    have = _have(project, requirement or [], env)
    hosts = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant, exclude).read()
    matrix = layered_matrix()
    rows: list[dict[str, Any]] = []
    for group in kinds(hosts):
        chosen = have.variant or (variant if variant != "auto" else None)
        verdict = judge(matrix, have.pins, group, python or have.python, chosen)
        rows.append(
            {
                "hosts": sorted(h.name for h in group),
                "count": sum(h.count for h in group),
                "driver": group[0].driver,
                "ok": verdict.ok,
                "broken": [{"text": s.text, "source": s.source} for s in verdict.broken],
                "missing": [{"text": s.text, "source": s.source} for s in verdict.missing],
                "unknown": list(verdict.unknown),
            }
        )
    if json_:
        typer.echo(json.dumps({"schema": 1, "what": have.where, "kinds": rows}, indent=1, ensure_ascii=False))
    else:
        for row in rows:
            names = ", ".join(row["hosts"])
            typer.echo(f"{names} (driver {row['driver'] or 'none'}): {'runs' if row['ok'] else 'does not run'}")
            for statement in row["broken"]:
                typer.echo(f"  {statement['text']}")
            for statement in row["missing"]:
                typer.echo(f"  not there: {statement['text']}")
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _have(project: Path | None, files: list[Path], env: Path | None) -> Installed:
    from envforge.errors import UsageError
    from envforge.installed import Installed, from_prefix, from_requests
    from envforge.intake import read_requirements
    from envforge.resolver.plan import load_plan

    if env is not None:
        return from_prefix(env)
    if files:
        requests = [request for path in files for request in read_requirements(path)[0]]
        return from_requests(requests, ", ".join(map(str, files)))
    assert project is not None
    path = project / "plan.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{project} holds no plan.json", "give a folder that envforge made, -r FILE or --env"
        ) from error
    plan = load_plan(text, str(path))
    return Installed(plan.pins, plan.python, plan.variant, str(project))
