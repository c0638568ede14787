"""Small readers that take any text and never raise."""

from __future__ import annotations

import re

DRIVER = re.compile(r"(?<![\d.])\d{2,4}\.\d{1,3}(?:\.\d{1,3})?(?![\d.])", re.ASCII)
_DOTTED = re.compile(r"(?<![\w.])\d{1,4}(?:\.\d{1,4})+(?![\w])", re.ASCII)


def driver(text: str | None) -> str | None:
    """A driver version at the start of the text, kept as it is written ("440.33.01", "470.86")."""
    found = DRIVER.match((text or "").strip())
    return found[0] if found else None


def number(text: str | None) -> int | None:
    """The whole number at the start of the text ("24576 MiB" -> 24576), or None."""
    found = re.match(r"\s*(\d{1,9})(?:\.\d{0,9})?(?!\d)", text or "", re.ASCII)
    return int(found[1]) if found else None


def dotted(text: str | None) -> str | None:
    """The first dotted number anywhere in the text."""
    found = _DOTTED.search(text or "")
    return found[0] if found else None


def branch(version: str | None) -> int:
    """The driver branch, 0 when there is no version."""
    return int(version.split(".")[0]) if version else 0


def first_line(text: str, width: int = 160) -> str:
    """The first line with something on it, cut to `width`; "" when there is none."""
    for line in text.splitlines():
        if line.strip():
            line = " ".join(line.split())
            return line if len(line) <= width else line[: width - 3] + "..."
    return ""


def bus(text: str | None) -> str | None:
    """A PCI address as `domain:bus:device.function` in lower case, domain of 4 digits ("0000:01:00.0")."""
    found = re.search(
        r"(?<![0-9a-f])(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])(?![0-9a-f])", (text or "").lower()
    )
    if not found:
        return None
    domain = (found[1] or "0").lstrip("0").rjust(4, "0")
    return f"{domain}:{found[2]}:{found[3]}.{found[4]}"
