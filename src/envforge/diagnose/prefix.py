"""Takes off what launchers and collectors put in front of a line, and reads the rank from it."""

from __future__ import annotations

import re

_RANK = re.compile(
    r"\[(?:rank|default)\s?(\d+)\]:?\s?|(\d{1,4}):\s+(?=\S)|\((?:\w+,? )?rank=(\d+)[^)]*\)\s?", re.IGNORECASE
)
_OTHER = re.compile(
    r"""\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?\s?(?:std(?:out|err)\s[FP]\s)?
      |[A-Z][a-z]{2}\s+\d{1,2}\s\d\d:\d\d:\d\d\s[\w.-]+\s+(?:kernel:\s)?(?=\S)
      |\[\s*\d+\.\d{3,6}\]\s
      |\[pod/[^\]\s]+\]\s
      |\((?:\w+\s)?pid=\d+[^)]*\)\s?
      |(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s(?:\d\d-\d\d\s)?\d\d:\d\d:\d\d\s\[[\w.]+:\d+\]\s
      |\#\d{1,3}\s+\d+\.\d+\s
      |[\w.-]{2,40}\s{1,20}\|\s
      |\d\d:\d\d:\d\d\s
    """,
    re.VERBOSE,
)

_DOCKER = '{"log":"'  # docker's json-file driver
_STARTS = frozenset("{[(#0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def strip(text: str) -> tuple[str, str | None]:
    """(the line without its prefixes, the rank or None)."""
    rank: str | None = None
    at = 0
    if text[:1] not in _STARTS:
        return text, None
    if text.startswith(_DOCKER):
        end = text.rfind('","stream"')
        text = text[len(_DOCKER) : end if end > 0 else None].rstrip("\n")
    for _ in range(6):
        found = _RANK.match(text, at)
        if found:
            rank = rank or found[1] or found[2] or found[3]
        else:
            found = _OTHER.match(text, at)
        if not found or found.end() == at:
            break
        at = found.end()
    return text[at:], rank
