"""envforge config: what is set, and where each value came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="What is set for this machine, user and project.", no_args_is_help=True)
    group.command("show")(show)
    app.add_typer(group, name="config")


def show(
    project: Annotated[Path | None, typer.Argument(help="Project folder (default: this folder, if it is one).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Show every setting, and which file, variable or default it came from."""
    import json

    from envforge.errors import UsageError
    from envforge.settings import KEYS, find_project, load_settings, places

    if project is not None and not project.is_dir():
        raise UsageError(f"{project} is no folder", "name a project's folder, or leave it out")
    folder = project or find_project(Path.cwd())
    settings = load_settings(folder)
    rows = []
    for key in KEYS:
        rows.append({"key": key, "value": plain(getattr(settings, key)), "origins": list(settings.origins[key])})
    files = [
        {
            "layer": place.name,
            "config": str(place.config),
            "there": place.config.is_file(),
            "rows": str(place.rows),
            "rows_there": place.rows.is_dir(),
        }
        for place in places(folder)
    ]
    if json_:
        typer.echo(json.dumps({"schema": 1, "settings": rows, "layers": files}, indent=1, ensure_ascii=False))
        return
    for row in rows:
        typer.echo(f"{row['key']}: {words(row['value'])}\n    from {', '.join(row['origins'])}")
    typer.echo("read, lowest first:")
    for file in files:
        typer.echo(f"  {file['layer']}: {file['config']}{'' if file['there'] else ' (not there)'}")
        typer.echo(f"    matrix rows: {file['rows']}{'' if file['rows_there'] else ' (not there)'}")


def plain(value: Any) -> Any:
    """A setting as plain data. Addresses lose user names and passwords: this gets pasted into reports."""
    from envforge.lock.settings import redact

    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return ["".join(item) if isinstance(item, tuple) else plain(item) for item in value]
    return value


def words(value: Any) -> str:
    """A setting for people."""
    if not value:
        return "not set"
    if isinstance(value, dict):
        return ", ".join(f"{key}={inner}" for key, inner in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)
