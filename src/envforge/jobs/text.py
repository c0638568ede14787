"""The template environment of jobs, and the quoting that every user's word passes on its way into a script."""

from __future__ import annotations

import csv
import io
import re
import shlex
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from envforge.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent.parent / "templates" / "jobs"


@lru_cache(maxsize=1)
def environment() -> Environment:
    """An unknown name in a template is a fault, never an empty string."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell syntax, not HTML: every user's value passes a filter
    )
    found.filters.update(sh=shlex.quote, directive=directive)
    return found


def directive(value: object) -> str:
    """A value behind `#SBATCH --option=`: sbatch splits at blanks and knows double quotes and backslashes.

    Raises:
        DataError: a line break or control character, which a comment line cannot carry.
    """
    text = str(value)
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise DataError(f"{text[:60]!r} holds a line break or control character", "remove it from the value")
    if re.fullmatch(r"[\w./,:@&|*\[\]()=+%-]+", text, re.ASCII):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def fields(*values: str) -> str:
    """One line of comma-separated values as docker, podman and apptainer read `--mount`: quoted where needed."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(values)
    return out.getvalue()
