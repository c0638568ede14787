"""The application: registers every command module, and turns failures into messages and exit codes."""

from __future__ import annotations

import functools
import importlib
import sys

import typer

app = typer.Typer(
    name="envforge",
    help="From host facts and a request to a fine-tuning environment that is proven to chat and to train.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# A module in this list has `register(app)`; one that does not exist yet is a fault, not an option.
COMMANDS = (
    "detect",
    "resolve",
    "matrix",
    "check",
    "render",
    "build",
    "images",
    "bundle",
    "project",
    "diagnose",
    "model",
    "config",
    "verify",
    "job",
)


@app.callback()
def _root() -> None:
    # Without a callback an application with a single command would swallow that command's name.
    return


@functools.cache
def register() -> None:
    """Add every command, once: a program that calls `main` many times would otherwise get slower with each call."""
    for name in COMMANDS:
        importlib.import_module(f"envforge.cli.{name}").register(app)


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 an honest no, 2 bad input, 3 something outside, 70 our fault, 86 preflight."""
    from envforge.cli.run import run

    register()
    sys.exit(run(app, sys.argv[1:] if argv is None else argv))
