"""Dockerfile syntax for values that users choose. Nothing here can reach a shell: RUN is always in its exec form."""

from __future__ import annotations

import json
import re

from envforge.errors import DataError
from envforge.words import control_character, env_name, reference

__all__ = ["argv", "debian_package", "env_name", "path", "quoted", "reference"]

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?")


def _printable(value: str, what: str) -> str:
    if bad := control_character(value):
        raise DataError(f"{what} holds a line break or control character ({bad})", "remove it from the value")
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


def debian_package(value: str) -> str:
    """A Debian package, with or without `=version`.

    Raises:
        DataError: anything else, options included.
    """
    if not _PACKAGE.fullmatch(value):
        raise DataError(f"{value!r} is not a Debian package name", "give it as name or name=version")
    return value
