"""The application: registers command modules, and turns failures into messages and exit codes."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Sequence

import typer

# Module -> the commands that its `register(app)` adds. Building typer's parameters for all of them costs as much as a
# whole resolve, so a call that names its command first gets that module alone.
COMMANDS = {
    "detect": ("detect",),
    "resolve": ("resolve",),
    "matrix": ("matrix",),
    "check": ("check",),
    "render": ("render",),
    "build": ("build",),
    "images": ("images",),
    "bundle": ("bundle",),
    "project": ("init", "diff"),
    "diagnose": ("diagnose",),
    "model": ("model",),
    "config": ("config",),
    "verify": ("verify",),
    "job": ("job",),
}


@functools.cache
def application(*modules: str) -> typer.Typer:
    """The application with these modules' commands, or with all; made once, since a program may call it many times."""
    app = typer.Typer(
        name="envforge",
        help="From host facts and a request to a fine-tuning environment that is proven to chat and to train.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _root() -> None:
        # Without a callback an application with a single command would swallow that command's name.
        return

    for name in modules or COMMANDS:
        importlib.import_module(f"envforge.cli.{name}").register(app)
    return app


def needed(argv: Sequence[str]) -> tuple[str, ...]:
    """The module whose command stands first on the line; none where something else stands there."""
    return tuple(module for module, names in COMMANDS.items() if argv and argv[0] in names)


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 an honest no, 2 bad input, 3 something outside, 70 our fault, 86 preflight."""
    from envforge.cli.run import run

    if argv is not None:
        sys.exit(run(application(*needed(argv)), argv))
    # Nearly everything that a command makes lives to its end: looking for garbage among it, and once more at exit, is a
    # fifth of a resolve.
    gc.set_threshold(50_000, 20, 20)
    code = run(application(*needed(sys.argv[1:])), sys.argv[1:])
    gc.freeze()
    sys.exit(code)
