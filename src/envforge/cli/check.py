"""envforge check: does what I have run on these hosts, and if not, why; per kind of host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envforge.cli import target as t

if TYPE_CHECKING:
    from envforge.installed import Installed
    from envforge.matrix.model import Matrix
    from envforge.resolver.hosts import Host


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
                "could": _could(matrix, have, group) if verdict.ok else [],
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
            if row["could"]:
                typer.echo(f"  resolved anew it could have {', '.join(row['could'])}")
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _could(matrix: Matrix, have: Installed, group: tuple[Host, ...]) -> list[str]:
    """What the same request would get on these hosts now: what may move up after a driver upgrade."""
    from dataclasses import replace

    from envforge.resolver.encoding import minor_of, variant_cuda_key
    from envforge.resolver.fleet import gains
    from envforge.resolver.request import parse_request
    from envforge.resolver.resolve import Wish, resolve_light

    if not have.requests or have.variant in (None, "cpu") or not all(host.has_gpu for host in group):
        return []
    requests = tuple(parse_request(line) for line in have.requests)
    plan = resolve_light(matrix, Wish(requests, group))
    if plan is None or plan.variant == "cpu":
        return []
    old = replace(plan, pins=dict(have.pins), variant=have.variant, python=have.python or plan.python)
    torch = [tuple(map(int, minor_of(p.get("torch", "0.0")).split("."))) for p in (have.pins, plan.pins)]
    newer = torch[1] > torch[0] or variant_cuda_key(plan.variant) > variant_cuda_key(str(have.variant))
    return list(gains(old, plan, [request.name for request in requests])) if newer else []


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
    return Installed(plan.pins, plan.python, plan.variant, str(project), plan.requests)
