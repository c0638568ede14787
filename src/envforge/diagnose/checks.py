"""Checks that a pattern alone cannot make: the numbers of a message, or what stands around it.

A check gets the match and the text around it and returns None (not this) or further named groups; the key
`confidence` among them replaces the case's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from envforge.diagnose import frames, memory
from envforge.diagnose.facts import version

Around = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class Context:
    """What a check sees: the match, its line, and a window of lines on demand."""

    match: re.Match[str]
    text: str
    around: Around


Check = Callable[[Context], "Mapping[str, str] | None"]


def _oom(verdict: str) -> Check:
    def check(context: Context) -> Mapping[str, str] | None:
        found = memory.judge(context.text, context.around)
        return found.groups(verdict) if verdict in found.verdicts else None

    return check


def _range(inside: bool) -> Check:
    """Compute capability against the range that torch prints: a higher minor of a covered major runs."""

    def check(context: Context) -> Mapping[str, str] | None:
        text = context.around(0, 4)
        found = re.search(r"\((\d+\.\d)\)\s*-\s*\((\d+\.\d)\)", text)
        if not found:
            return None
        have = version(context.match["sm"])
        low, high = version(found[1]), version(found[2])
        covered = low <= have <= high or have[0] == high[0]
        return {"low": found[1], "high": found[2]} if covered is inside else None

    return check


def _published(context: Context) -> Mapping[str, str] | None:
    """pip lists the versions it knows: the wanted one is newer than all of them."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion, Version

    listed = context.match.groupdict().get("listed") or ""
    known: list[Version] = []
    for part in listed.split(","):
        try:
            known.append(Version(part.strip().rstrip(".")))
        except InvalidVersion:
            continue
    if not known:
        return None
    newest = max(known)
    try:
        wanted = SpecifierSet(re.sub(r"[;(].*", "", context.match["wanted_range"]).strip())
    except InvalidSpecifier:
        return None
    floors = [Version(spec.version.rstrip(".*")) for spec in wanted if spec.operator in (">=", "==", ">", "~=", "===")]
    if floors and max(floors) > newest:
        return {"newest": str(newest), "floor_wanted": str(max(floors))}
    return None


def _unpublished_elsewhere(context: Context) -> Mapping[str, str] | None:
    """The opposite of `_published`: nothing fits although newer releases are listed, or nothing is listed at all."""
    return None if _published(context) else {}


def _skew(context: Context) -> Mapping[str, str] | None:
    """Names the package whose file asks, and the one that does not give."""
    lines = context.around(30, 0)
    if frames.is_remote_code(lines):
        return None
    groups = context.match.groupdict()
    provider = frames.top(groups.get("provider") or "")
    culprit = frames.asking_package(lines)
    if culprit and culprit == provider:  # a package that contradicts itself was overwritten or half upgraded
        return {"culprit": frames.dist(culprit), "provider_dist": frames.dist(provider), "confidence": "likely"}
    found = {"provider_dist": frames.dist(provider)} if provider else {}
    if culprit:
        return found | {"culprit": frames.dist(culprit)}
    return found | {"confidence": "likely"}


def _remote_code(context: Context) -> Mapping[str, str] | None:
    lines = context.around(40, 0)
    if not frames.is_remote_code(lines):
        return None
    name = frames.remote_file(lines)
    return {"remote_file": name} if name else {}


def _missing_module(context: Context) -> Mapping[str, str] | None:
    """A module that is missing as a whole; a missing part of an installed package is skew."""
    module = context.match["module"]
    if frames.is_remote_part(module):
        return None
    return {"package": frames.dist(frames.top(module)), "top": frames.top(module)}


def _finite_loss(context: Context) -> Mapping[str, str] | None:
    """The gradient norm is NaN on a line whose loss is a number other than an exact zero."""
    found = re.search(r"(?<![a-z_])(?:train_|lm )?loss['\"]?\s*[:=]?\s*([\w.+-]+)", context.text, re.IGNORECASE)
    if not found:
        return {"confidence": "possible"}
    value = found[1].lower().rstrip(".,")
    if value.startswith(("nan", "inf", "-inf")):
        return None
    return {"loss": found[1]} if re.match(r"[+-]?[\d.]", value) and not _zero(value) else None


def _zero_loss(context: Context) -> Mapping[str, str] | None:
    found = re.search(r"(?<![a-z_])(?:train_)?loss['\"]?\s*[:=]?\s*([\d.]+)", context.text, re.IGNORECASE)
    return {} if found and _zero(found[1]) else None


def _zero(text: str) -> bool:
    try:
        return float(text.rstrip(".,")) == 0.0
    except ValueError:
        return False


def _mixed_devices(kind: str) -> Check:
    def check(context: Context) -> Mapping[str, str] | None:
        text = context.match[0] + context.text[context.match.end() : context.match.end() + 400]
        devices = set(re.findall(r"\bcuda:\d+|index=\d+|\bcpu\b", text))
        has_cpu = "cpu" in devices
        return {} if has_cpu is (kind == "cpu") else None

    return check


CHECKS: Mapping[str, Check] = {
    "oom-capacity": _oom("capacity"),
    "oom-fragmentation": _oom("fragmentation"),
    "oom-other-process": _oom("other-process"),
    "oom-unknown": _oom("unknown"),
    "capability-covered": _range(inside=True),
    "capability-outside": _range(inside=False),
    "newer-than-published": _published,
    "not-newer-than-published": _unpublished_elsewhere,
    "skew": _skew,
    "remote-code": _remote_code,
    "missing-module": _missing_module,
    "finite-loss": _finite_loss,
    "zero-loss": _zero_loss,
    "devices-with-cpu": _mixed_devices("cpu"),
    "devices-gpus": _mixed_devices("gpus"),
}
