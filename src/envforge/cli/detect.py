"""envforge detect: what this machine, or a recorded one, offers to a CUDA program, and what is wrong with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from envforge.host import HostFacts, Override


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("detect")(detect)


def detect(
    driver: Annotated[
        str | None,
        typer.Option(help="Take this driver version instead of the machine's, or none. Default: ENVFORGE_DRIVER."),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write what was seen on this machine into a new folder.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read such a folder instead of this machine.")
    ] = None,
    script: Annotated[
        bool, typer.Option("--script", help="Print the shell probe, which writes such a folder where Python lacks.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 when there are problems.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Show driver, GPUs and system, and name what keeps a GPU from working."""
    from envforge.errors import UsageError
    from envforge.host import probe_script, to_json

    if script:
        sys.stdout.write(probe_script())
        return
    if record is not None and recorded is not None:
        raise UsageError("--record and --recorded cannot go together", "copy the folder to keep a second one")
    facts = find_facts(driver, record=record, recorded=recorded, engine=True)
    if record is not None:
        typer.echo(f"record written to {record}", err=True)
    say(json.dumps(to_json(facts), indent=1, sort_keys=True) if json_ else table(facts))
    if check and facts.problems:
        raise typer.Exit(1)


def find_facts(
    driver: str | None = None,
    *,
    record: Path | None = None,
    recorded: Path | None = None,
    engine: bool = False,
) -> HostFacts:
    """The facts of this machine, or of a record folder.

    Args:
        driver: the user's word, as typed; ENVFORGE_DRIVER counts for this machine where it is None.
        record: a new folder that gets what was seen here.
        recorded: a record folder to read instead of this machine.
        engine: also ask the container engines (up to 2 s).

    Raises:
        UsageError: malformed driver, unreadable record folder, or a place where no record can be written.
    """
    import os

    from envforge.errors import DataError
    from envforge.host import check_new_folder, gather, interpret, read_record, write_record
    from envforge.host.names import gpu_finder
    from envforge.settings import layered_matrix

    override = _override(driver, "--driver")
    if override is None and recorded is None:
        override = _override(os.environ.get("ENVFORGE_DRIVER") or None, "ENVFORGE_DRIVER")
    try:
        finder = gpu_finder(layered_matrix())
    except DataError as error:
        # A broken matrix layer must not keep anyone from seeing the machine's own facts.
        typer.echo(f"warning: GPU names are not looked up: {error.cause}", err=True)
        finder = None
    if recorded is not None:
        return interpret(read_record(recorded), override, finder)
    if record is not None:
        check_new_folder(record)
    seen = gather(engine=engine, everything=record is not None)
    if driver is not None and override is not None:
        rest = [line for line in seen.get("env", "").splitlines() if not line.startswith("ENVFORGE_DRIVER=")]
        seen["env"] = "".join(f"{line}\n" for line in [*rest, f"ENVFORGE_DRIVER={override.driver or 'none'}"])
    if record is not None:
        write_record(seen, record)
    return interpret(seen, override, finder)


def _override(text: str | None, where: str) -> Override | None:
    from envforge.errors import UsageError
    from envforge.host import Override
    from envforge.resolver.hosts import parse_driver

    if text is None:
        return None
    try:
        return Override(parse_driver(text))
    except UsageError as error:
        raise UsageError(f"{where}: {error.cause}", error.hint) from error


def say(text: str) -> None:
    """To stdout, also where its encoding lacks a character of a recorded text."""
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "replace").decode(encoding))


def table(facts: HostFacts) -> str:
    """The facts for people."""
    told = f"{facts.driver} ({facts.source})" if facts.driver else "none"
    rows = [("driver", told + (f", CUDA up to {facts.cuda_max}" if facts.cuda_max else ""))]
    if facts.source == "override" and not facts.driver:
        rows = [("driver", "none (override)")]
    system = [
        facts.os,
        f"glibc {facts.glibc}" if facts.glibc else None,
        facts.arch,
        f"python {facts.python}" if facts.python else None,
        f"{facts.memory_mib} MiB memory" if facts.memory_mib else None,
    ]
    rows.append(("system", ", ".join(filter(None, system)) or "not told"))
    if facts.engine:
        rows.append(("engine", f"{facts.engine.name} {facts.engine.version or '(installed, does not answer)'}"))
    around = [
        "WSL (the driver is the one installed on Windows)" if facts.wsl else None,
        "inside a container" if facts.container else None,
        "inside a Slurm job" if facts.slurm else None,
    ]
    if any(around):
        rows.append(("around", ", ".join(filter(None, around))))
    lines = [f"{name:<8} {value}" for name, value in rows]
    lines += ["", *_gpu_lines(facts)] if facts.gpus else ["gpus     none"]
    for problem in facts.problems:
        lines += ["", f"problem  {problem.id}: {problem.text}", f"fix      {problem.fix}"]
    return "\n".join(lines)


def _gpu_lines(facts: HostFacts) -> list[str]:
    cells = [("GPU", "name", "sm", "memory", "MIG", "processes")]
    for gpu in facts.gpus:
        used = f"{gpu.memory_used_mib} of " if gpu.memory_used_mib is not None and gpu.memory_mib is not None else ""
        cells.append(
            (
                str(gpu.index),
                (gpu.name or "not told") + (" (vGPU)" if gpu.vgpu else ""),
                gpu.sm or "?",
                f"{used}{gpu.memory_mib} MiB" if gpu.memory_mib is not None else "not told",
                "on" if gpu.mig else "off",
                ", ".join(f"{row.pid} {row.name or ''}".strip() for row in gpu.processes[:4])
                + (f" and {len(gpu.processes) - 4} more" if len(gpu.processes) > 4 else ""),
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip()
        for row in cells
    ]
