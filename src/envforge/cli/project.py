"""envforge init and envforge diff: project folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

STARTER = """\
schema: 1
name: {name}
summary: My fine-tuning stack.
requests:
  - torch
  - transformers
  - peft
  - accelerate
  - datasets
verify:
  stack: transformers
  steps: 8
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("init")(init)
    app.command("diff")(diff)


def init(
    folder: Annotated[Path, typer.Argument(help="The project folder to make.")],
    spec: Annotated[str | None, typer.Option(help="Start from a ready-made stack.")] = None,
) -> None:
    """Make a project folder with an image.yaml to edit."""
    import re

    from envforge.project import init as make
    from envforge.spec import find_spec

    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("-.") or "project"
    text = find_spec(spec).read_text(encoding="utf-8") if spec else STARTER.format(name=name)
    path = make(folder, text)
    typer.echo(f"{path} is made; next: envforge resolve {folder} --driver none (or describe your hosts)")


def diff(
    old: Annotated[Path, typer.Argument(help="A plan: project folder or file.")],
    new: Annotated[Path, typer.Argument(help="Another plan.")],
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """What changes from one plan to another."""
    import json

    from envforge.project import diff as compare
    from envforge.project import plan_of

    rows = compare(plan_of(old), plan_of(new))
    if json_:
        typer.echo(json.dumps({"schema": 1, "changes": rows}, indent=1))
        return
    for row in rows:
        typer.echo(f"{row['name']}: {row['old'] or 'not there'} -> {row['new'] or 'gone'}")
    if not rows:
        typer.echo("no difference")
