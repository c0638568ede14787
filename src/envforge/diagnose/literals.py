"""Finds the plain text that every match of a pattern must contain, so that most of a log is never shown to a regex.

Only what a rule file needs is understood: the text outside groups, classes and optional parts. A pattern whose top
level is an alternation has no such text; its author writes two patterns instead.
"""

from __future__ import annotations

import re

MIN_LENGTH = 4
# Frequent in healthy logs: a run like this is only taken when the pattern has nothing better.
_COMMON = (
    "error: ", "runtimeerror", "warning", "site-packages", "traceback", "nvidia", "python", "version", "loss", "failed",
)  # fmt: skip
_ESCAPED_CLASSES = set("dDwWsSbBAZ0123456789")


def required_literal(pattern: str) -> str | None:
    """The best run of lower-case ASCII text that any case-insensitive match of `pattern` contains.

    Returns None when there is no run of at least MIN_LENGTH characters outside groups and classes.
    """
    runs = _runs(pattern)
    usable = [run for run in runs if len(run) >= MIN_LENGTH]
    if not usable:
        return None
    return max(usable, key=lambda run: (min(len(run), 24) - (12 if run.strip() in _COMMON else 0), len(run)))


def _runs(pattern: str) -> list[str]:
    """Maximal runs of literal characters at depth 0; empty when the top level holds an alternation."""
    runs: list[str] = []
    run = ""
    depth = 0
    i = 0
    while i < len(pattern):
        char = pattern[i]
        literal: str | None = None
        if char == "\\":
            following = pattern[i + 1 : i + 2]
            literal = None if following in _ESCAPED_CLASSES else _unescape(following)
            i += 2
        elif char == "[":
            i = _skip_class(pattern, i)
        elif char == "(":
            depth += 1
            i += 1
        elif char == ")":
            depth -= 1
            i += 1
        elif char == "|":
            if depth == 0:
                return []
            i += 1
        elif char in ".^$":
            i += 1
        else:
            literal = char
            i += 1
        quantifier = re.match(r"[?*+]\??|\{[0-9,]+\}\??", pattern[i:])
        if quantifier:
            i += quantifier.end()
        if depth == 0 and literal is not None and literal.isascii() and (not quantifier or quantifier[0][0] == "+"):
            run += literal.lower()
            if not quantifier:
                continue
        runs.append(run)
        run = ""
    runs.append(run)
    return [r for r in runs if r]


def _unescape(char: str) -> str | None:
    return {"n": None, "t": None, "r": None}.get(char, char) if char else None


def _skip_class(pattern: str, start: int) -> int:
    """Index after the class that opens at `start`."""
    i = start + 1
    if pattern[i : i + 1] == "^":
        i += 1
    if pattern[i : i + 1] == "]":
        i += 1
    while i < len(pattern) and pattern[i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i + 1
