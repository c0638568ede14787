"""The shapes of words that end up in other programs' files: image references, names of variables.

One place for images and jobs, so that what one accepts the other can carry.
"""

from __future__ import annotations

import re

from envforge.errors import DataError

_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]{0,254}(@sha256:[0-9a-f]{64})?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Also what only some programs end a line at: the C1 set (with U+0085), U+2028, U+2029; and halves of a surrogate pair.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def control_character(value: str) -> str | None:
    """The first line break or control character in a text, as U+000A; None where there is none."""
    found = _CONTROL.search(value)
    return f"U+{ord(found[0]):04X}" if found else None


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
