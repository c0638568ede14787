"""Dockerfile syntax for values that users choose. Nothing here can reach a shell: RUN is always in its exec form."""

from __future__ import annotations

import json
import re

from envforge.errors import DataError

_REFERENCE = re.compile(r"^[a-z0-9][A-Za-z0-9._:/-]{0,254}(@sha256:[0-9a-f]{64})?$")
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_PACKAGE = re.compile(r"^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?$")


def _printable(value: str, what: str) -> str:
    bad = next((c for c in value if ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF), None)
    if bad is not None:
        raise DataError(
            f"{what} holds a line break or control character (U+{ord(bad):04X})", "remove it from the value"
        )
    return value


def quoted(value: str) -> str:
    """A word for ENV and LABEL: double quotes, with `\\`, `"` and the variable sign escaped.

    Raises:
        DataError: a line break or control character, which Dockerfile syntax cannot carry.
    """
    text = _printable(value, "a value for the Dockerfile")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def path(value: str) -> str:
    """A word for the JSON form of COPY, where quotes are taken away and variables expanded inside the strings too."""
    text = _printable(value, "a path for the Dockerfile")
    return json.dumps(re.sub(r"([\\$\"'])", r"\\\1", text), ensure_ascii=False)


def argv(values: list[str]) -> str:
    """The exec form of RUN: no shell, and no expansion by the builder either."""
    return json.dumps([_printable(value, "an argument of a build step") for value in values], ensure_ascii=False)


def reference(value: str) -> str:
    """An image reference for FROM.

    Raises:
        DataError: not a reference (spaces, variables, upper-case repository, line breaks).
    """
    if not _REFERENCE.match(value):
        raise DataError(f"{value!r} is not an image reference", "give it as name:tag or name@sha256:...")
    return value


def env_name(value: str) -> str:
    """A variable's name.

    Raises:
        DataError: not a name that every shell and Docker take.
    """
    if not _ENV_NAME.match(value):
        raise DataError(f"{value!r} is not a name for an environment variable", "use letters, digits and _")
    return value


def debian_package(value: str) -> str:
    """A Debian package, with or without `=version`.

    Raises:
        DataError: anything else, options included.
    """
    if not _PACKAGE.match(value):
        raise DataError(f"{value!r} is not a Debian package name", "give it as name or name=version")
    return value
