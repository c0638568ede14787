"""The shapes of words that end up in other programs' files: image references, names of variables.

One place for images and jobs, so that what one accepts the other can carry.
"""

from __future__ import annotations

import re

from envforge.errors import DataError

_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]{0,254}(@sha256:[0-9a-f]{64})?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def reference(value: str) -> str:
    """An image reference.

    Raises:
        DataError: not a reference (spaces, variables, upper-case repository, line breaks).
    """
    if not _REFERENCE.fullmatch(value):
        raise DataError(f"{value[:200]!r} is not an image reference", "give it as name:tag or name@sha256:...")
    return value


def env_name(value: str) -> str:
    """A variable's name.

    Raises:
        DataError: not a name that every shell and Docker take.
    """
    if not _ENV_NAME.fullmatch(value):
        raise DataError(f"{value[:100]!r} is not a name for an environment variable", "use letters, digits and _")
    return value
