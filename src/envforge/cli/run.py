"""Runs the application and maps whatever comes out of it to the documented exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

from envforge.ending import ended_as_exit
from envforge.errors import EnvforgeError

if TYPE_CHECKING:
    import typer

ISSUE_HINT = "this is a fault of envforge: run again with --debug and report the traceback"


def run(app: typer.Typer, argv: list[str]) -> int:
    """-> exit code. Tracebacks only with --debug, which is accepted anywhere on the line (before a bare --)."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    debug = "--debug" in own
    if debug:
        argv = list(argv)
        argv.remove("--debug")
    try:
        with ended_as_exit():
            app(args=argv, prog_name="envforge")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else (0 if stop.code is None else 2)
    except EnvforgeError as error:
        if debug:
            traceback.print_exc()
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; nothing half-written was kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (envforge ... | head): not an error, but Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - the one place where everything else ends
        if debug:
            traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}\n\nhint: {ISSUE_HINT}", file=sys.stderr)
        return 70
    return 0
