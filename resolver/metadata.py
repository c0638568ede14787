"""Requires-Dist lines, read fast: thousands per resolve, most of one plain shape.

Only the plain shape is taken apart here; everything else goes through `packaging`. Markers are evaluated per Python
minor for CPython on Linux, so that a line becomes: dependency, extras, specifier, and for which pythons it holds.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from envforge.resolver.request import normalise

_PLAIN = re.compile(
    r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([A-Za-z0-9._,\s-]+)\])?\s*(?:\(([^()]*)\)|([<>=!~]{1,3}\s*[A-Za-z0-9][^;@()]*)?)\s*(?:;(.*))?$"
)
_EXTRA = re.compile(r"""^\s*extra\s*==\s*(['"])([A-Za-z0-9._-]+)\1\s*$""")
_EXTRA_TAIL = re.compile(r"""^(.*?)\s+and\s+extra\s*==\s*(['"])([A-Za-z0-9._-]+)\2\s*$""")


class Dependency(NamedTuple):
    """One line: normalised name, its extras, specifier text, marker without the extra part, and that extra."""

    name: str
    extras: tuple[str, ...]
    specifier: str
    marker: str | None
    extra: str | None
    url: bool = False


@lru_cache(maxsize=20_000)
def parse_line(line: str) -> Dependency | None:
    """A Requires-Dist line -> Dependency; None for a line that no standard tool accepts (old releases hold some)."""
    match = _PLAIN.match(line)
    if match:
        name, extras, bracketed, bare, marker = match.groups()
        extra = None
        if marker is not None:
            marker = marker.strip()
            whole = _EXTRA.match(marker)
            if whole:
                marker, extra = None, normalise(whole[2])
            else:
                tail = _EXTRA_TAIL.match(marker)
                if tail and "extra" not in tail[1]:
                    marker, extra = _unwrap(tail[1].strip()), normalise(tail[3])
        names = tuple(sorted(normalise(e.strip()) for e in extras.split(",") if e.strip())) if extras else ()
        return Dependency(normalise(name), names, (bracketed or bare or "").strip(), marker or None, extra)
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        parsed = Requirement(line)
    except InvalidRequirement:
        return None
    return Dependency(
        normalise(parsed.name),
        tuple(sorted(normalise(e) for e in parsed.extras)),
        str(parsed.specifier),
        str(parsed.marker) if parsed.marker else None,
        None,
        parsed.url is not None,
    )


def _unwrap(marker: str) -> str:
    """`(a or b)` -> `a or b` where the brackets belong together."""
    if not (marker.startswith("(") and marker.endswith(")")):
        return marker
    depth = 0
    for i, char in enumerate(marker):
        depth += (char == "(") - (char == ")")
        if depth == 0 and i < len(marker) - 1:
            return marker
    return marker[1:-1].strip()


_VERSION = re.compile(r"""^\s*python(?:_full)?_version\s*(<=|>=|<|>|==|!=)\s*(['"])(3)\.(\d+)(?:\.\d+)?\2\s*$""")
_PLATFORM = re.compile(
    r"""^\s*(sys_platform|platform_system|platform_machine|os_name|platform_python_implementation|implementation_name)\s*(==|!=)\s*(['"])([^'"]*)\3\s*$"""
)


@lru_cache(maxsize=10_000)
def marker_pythons(marker: str | None, pythons: tuple[str, ...], arch: str, extra: str = "") -> tuple[bool, ...]:
    """For each Python minor ("3.11"): does the marker hold on Linux, CPython, this machine architecture?"""
    if marker is None:
        return (True,) * len(pythons)
    quick = _quick(marker, pythons, arch)
    if quick is not None:
        return quick
    from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName

    try:
        parsed = Marker(marker)
        return tuple(parsed.evaluate({**environment(python, arch), "extra": extra}) for python in pythons)
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName):
        return (True,) * len(pythons)


def environment(python: str, arch: str) -> dict[str, str]:
    """The PEP 508 environment of a target."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.99",
        "os_name": "posix",
        "platform_machine": arch,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.99",
        "python_version": python,
        "sys_platform": "linux",
    }


def _quick(marker: str, pythons: tuple[str, ...], arch: str) -> tuple[bool, ...] | None:
    """Conjunctions of simple comparisons, which nearly all markers are; None for anything else."""
    result = [True] * len(pythons)
    for part in marker.split(" and "):
        match = _VERSION.match(part)
        if match:
            if part.strip().startswith("python_full"):
                return None
            operator, minor = match[1], int(match[4])
            for i, python in enumerate(pythons):
                have = int(python.split(".")[1])
                result[i] &= {
                    "<": have < minor,
                    "<=": have <= minor,
                    ">": have > minor,
                    ">=": have >= minor,
                    "==": have == minor,
                    "!=": have != minor,
                }[operator]
            continue
        match = _PLATFORM.match(part)
        if not match:
            return None
        equal = environment("3.11", arch)[match[1]] == match[4]
        if equal != (match[2] == "=="):
            return (False,) * len(pythons)
    return tuple(result)


_TAG = re.compile(
    r"manylinux_(\d+)_(\d+)_(x86_64|aarch64)|manylinux(1|2010|2014)_(x86_64|aarch64)|linux_(x86_64|aarch64)|(any)"
)
_LEGACY = {"1": (2, 5), "2010": (2, 12), "2014": (2, 17)}


@lru_cache(maxsize=4_000)
def wheel_fits(tag: str, pythons: tuple[str, ...], arch: str) -> tuple[tuple[int, int] | None, tuple[bool, ...]]:
    """A compressed wheel tag set -> (lowest glibc that it accepts, or None when the platform does not fit; (0, 0) for
    `any`), and for each Python minor whether CPython of that minor takes it. PEP 425, 600."""
    python_tags, abi_tags, platforms = tag.split("-", 2)
    glibc: tuple[int, int] | None = None
    for platform in platforms.split("."):
        match = _TAG.fullmatch(platform)
        if not match:
            continue
        if match[7]:
            floor = (0, 0)
        else:
            if arch not in (match[3], match[5], match[6]):
                continue
            floor = (int(match[1]), int(match[2])) if match[1] else _LEGACY.get(match[4] or "", (0, 0))
        glibc = floor if glibc is None else min(glibc, floor)
    abis = abi_tags.split(".")
    fits = []
    for python in pythons:
        minor = int(python.split(".")[1])
        ok = False
        for tag_ in python_tags.split("."):
            if tag_ in ("py3", "py2.py3") or tag_ == f"py3{minor}":
                ok |= "none" in abis
            elif tag_.startswith("py3") and tag_[3:].isdigit():
                ok |= "none" in abis and int(tag_[3:]) <= minor
            elif tag_.startswith("cp3") and tag_[3:].isdigit():
                have = int(tag_[3:])
                ok |= have == minor and (f"cp3{minor}" in abis or "none" in abis or f"cp3{minor}m" in abis)
                ok |= "abi3" in abis and have <= minor
        fits.append(ok)
    return glibc, tuple(fits)
