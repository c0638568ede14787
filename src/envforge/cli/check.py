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


IDLE = "its torch is the CPU build: the GPUs there stay unused"
SLOW = "its torch is a CUDA build: without a GPU it runs on the CPU"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)


def check(
    what: Annotated[
        str | None, typer.Argument(metavar="DIR|IMAGE", help="A project folder, a folder that build made, or an image.")
    ] = None,
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
    from envforge.matrix.releases import known_packages
    from envforge.resolver.check import judge
    from envforge.resolver.fleet import kinds
    from envforge.settings import layered_matrix

    given = [x for x in (what, requirement, env) if x]
    if len(given) != 1:
        raise UsageError("check looks at one thing", "give a project folder, an image, -r FILE, or --env PREFIX")
    have = _have(what, requirement or [], env)
    hosts = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant, exclude).read()
    matrix = layered_matrix()
    rows: list[dict[str, Any]] = []
    known = set(known_packages())
    torch = f"torch=={have.pins.get('torch')}"
    unread = [name for name in have.unread if name in known]
    for group in kinds(hosts):
        with_gpu = any(h.has_gpu for h in group)
        chosen, notes = _torch_build(matrix, have, group, variant)
        verdict = judge(matrix, have.pins, group, python or have.python, chosen)
        unknown = [pin for pin in verdict.unknown if pin.partition("==")[0] in known]
        broken = [{"text": s.text, "source": s.source} for s in verdict.broken]
        if torch in unknown:
            text = f"{torch.replace('==', ' ')} is not known here, so nothing can be said of its builds"
            broken.append({"text": text, "source": "the releases of the matrix"})
        if "torch" in have.pins and chosen is not None and (chosen == "cpu") == with_gpu:
            notes.append(IDLE if with_gpu else SLOW)
        rows.append(
            {
                "hosts": sorted(h.name for h in group),
                "count": sum(h.count for h in group),
                "driver": group[0].driver,
                "ok": not broken,
                "broken": broken,
                "missing": [{"text": s.text, "source": s.source} for s in verdict.missing],
                "unknown": list(verdict.unknown),
                "notes": notes,
                "could": _could(matrix, have, group) if not broken else [],
            }
        )
    proven = _proven(what) if what is not None and not Path(what).is_dir() else None
    if json_:
        answer = {"schema": 1, "what": have.where, "proof": proven, "kinds": rows}
        typer.echo(json.dumps(answer, indent=1, ensure_ascii=False))
    else:
        if proven is not None:
            typer.echo(f"proven ({proven['grade']}, on {proven['device']}, {proven['started']}), says {proven['from']}")
        missing = [row["missing"] for row in rows]
        everywhere = missing[0] if missing.count(missing[0]) == len(missing) > 1 else []
        for row in rows:
            names = ", ".join(row["hosts"])
            typer.echo(f"{names} (driver {row['driver'] or 'none'}): {'runs' if row['ok'] else 'does not run'}")
            for statement in row["broken"]:
                typer.echo(f"  {statement['text']}")
            for statement in row["missing"] if not everywhere else ():
                typer.echo(f"  not there: {statement['text']}")
            for note in row["notes"]:
                typer.echo(f"  {note}")
            if row["could"]:
                typer.echo(f"  resolved anew it could have {', '.join(row['could'])}")
        for statement in everywhere:
            typer.echo(f"not there: {statement['text']}")
        if unjudged := dict.fromkeys([*unread, *(pin for pin in unknown if pin != torch)]):
            typer.echo(f"not judged, because the version is not known: {', '.join(unjudged)}")
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _torch_build(
    matrix: Matrix, have: Installed, group: tuple[Host, ...], variant: str
) -> tuple[str | None, list[str]]:
    """The build of torch that is there, and the note on how it is known where nothing names it."""
    from envforge.lock import default_variants
    from envforge.resolver.encoding import minor_of

    if have.variant or variant != "auto" or "torch" not in have.pins:
        return have.variant or (variant if variant != "auto" else None), []
    version = have.pins["torch"]
    found = default_variants(group[0].arch, matrix).get(minor_of(version))
    note = f"torch {version} names no build: taken for {found}, as of the default index (--variant names another)"
    return found, [note] if found else []


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


def _have(what: str | None, files: list[Path], env: Path | None) -> Installed:
    import re
    from dataclasses import replace

    from envforge.errors import UsageError
    from envforge.installed import Installed, from_prefix, from_requests
    from envforge.intake import read_requirements
    from envforge.project import read_plan

    if env is not None:
        return from_prefix(env)
    if files:
        requests = [request for path in files for request in read_requirements(path)[0]]
        have = from_requests(requests, ", ".join(map(str, files)))
        # A file that names the index of one build gets its torch from there.
        indexes = {
            m for path in files for m in re.findall(r"/whl/(cu[0-9]{3}|cpu)\b", path.read_text(errors="replace"))
        }
        return replace(have, variant=indexes.pop()) if have.variant is None and len(indexes) == 1 else have
    assert what is not None
    if not Path(what).is_dir():
        return _inside(what)
    plan = read_plan(Path(what))
    if plan is None:
        raise UsageError(f"{what} holds no plan.json", "give a folder that envforge made, an image, -r FILE or --env")
    return Installed(plan.pins, plan.python, plan.variant, what, plan.requests)


def _proven(reference: str) -> dict[str, Any] | None:
    """The receipt of an image: kept on this machine, or beside it in its registry."""
    from envforge.image.engines import choose_engine, container_engine
    from envforge.image.proofs import known_proof

    image = container_engine(choose_engine("auto")).inspect(reference)
    found = known_proof(image, reference) if image is not None else None
    if found is None:
        return None
    return {key: found[0].get(key) for key in ("grade", "device", "started")} | {"from": found[1]}


def _inside(reference: str) -> Installed:
    """What an image holds, as its own Python names it; fetched from its registry where the engine has it not."""
    from envforge.errors import OutsideError
    from envforge.image.adopt import packages_inside
    from envforge.image.engines import choose_engine, container_engine
    from envforge.image.library import plan_of
    from envforge.installed import from_versions

    if reference.startswith((".", "/", "~")):
        raise OutsideError(f"there is no folder {reference}", "name a folder with a plan.json, or an image")
    engine = container_engine(choose_engine("auto"))
    try:
        image = engine.inspect(reference) or engine.pull(reference)
    except OutsideError as error:
        error.cause = f"there is no folder {reference}, and no image: {error.cause}"
        raise
    python, packages = packages_inside(engine, image)
    plan = plan_of(image.labels, reference)
    return from_versions(packages.items(), python, reference, plan.requests if plan else ())
