"""The command line: the only code that prints or exits. One module per command; heavy imports stay inside functions."""

from __future__ import annotations

from envforge.cli.app import main

__all__ = ["main"]
