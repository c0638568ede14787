"""The template environment of jobs, and the quoting that every user's word passes on its way into a script."""

from __future__ import annotations

import csv
import io
import re
import shlex
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from envforge import texts
from envforge.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent.parent / "templates" / "jobs"


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The templates of job scripts."""
    return texts.environment(TEMPLATES, sh=shlex.quote, directive=directive)


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
