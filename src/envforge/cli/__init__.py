"""The command line: the only code that prints or exits. One module per command; heavy imports stay inside functions."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> None:
    """The command `envforge`; see `app.main`. Ctrl-C while the program is still loading ends as one later does."""
    try:
        from envforge.cli.app import main as start

        start(argv)
    except KeyboardInterrupt:
        import sys

        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
