"""How templates become text, the same for Dockerfiles and job scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(folder: Path, **filters: Callable[..., str]) -> Environment:
    """The templates of a folder: an unknown name in one is a fault, never an empty string.

    Nothing is escaped (this is no HTML): every value of a user passes one of the filters, which quote it.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    found.filters.update(filters)
    return found
