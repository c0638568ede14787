"""Masks in words: the shortest range that a person would write for a set of known versions.

The bounds are round numbers ("<2.3", not "<=2.2.2") as long as they cut between the same *known* versions; every range
that is proposed is read back with `Domain.mask` before it is used, so the words never say more or less than the mask.
Pre-releases are left out of the account unless there is nothing else in the mask: nobody gets one unasked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier
from packaging.version import Version

if TYPE_CHECKING:
    from envforge.resolver.versions import Domain

PARTS = 6  # more runs than this are cut short


def describe(domain: Domain, mask: int) -> str:
    """See `Domain.describe`; `mask` is without ABSENT."""
    if not mask:
        return "no version"
    if domain.labels:
        return _labels(domain, mask)
    finals = domain.all_mask & ~domain.pre_mask
    known = finals if mask & finals else domain.all_mask
    mask &= known
    if mask == known:
        return "any version"
    runs = _runs(domain, mask, known)
    if len(runs) == 1:
        return _run(domain, runs[0], mask, known)
    if all(len(run) == 1 for run in runs):
        positive = _cut([domain.value(run[0]) or "" for run in runs], ", ")
    else:
        positive = _cut([_run(domain, run, _mask(run), known) for run in runs], " or ")
    gaps = _runs(domain, known & ~mask, known)
    inner = [run for run in gaps if run[0] > runs[0][0] and run[-1] < runs[-1][-1]]
    negative = _without(domain, runs, inner, known)
    return negative if negative and len(negative) < len(positive) else positive


def _labels(domain: Domain, mask: int) -> str:
    if mask == domain.all_mask:
        return "any"
    named = [domain.value(position) or "" for position in domain.positions(mask)]
    others = [domain.value(position) or "" for position in domain.positions(domain.all_mask & ~mask)]
    if len(others) < 3 and len(others) < len(named) - 1:
        return "any but " + " and ".join(others)
    return ", ".join(named)


def _mask(positions: list[int]) -> int:
    return sum(1 << position for position in positions)


def _runs(domain: Domain, mask: int, known: int) -> list[list[int]]:
    """The positions of `mask`, split where a position of `known` lies between."""
    runs: list[list[int]] = []
    open_run = False
    for position in domain.positions(known):
        if not mask >> position & 1:
            open_run = False
        elif open_run:
            runs[-1].append(position)
        else:
            runs.append([position])
            open_run = True
    return runs


def _cut(parts: list[str], joint: str) -> str:
    if len(parts) <= PARTS:
        return joint.join(parts)
    return joint.join(parts[: PARTS - 1]) + f" and {len(parts) - PARTS + 1} more"


def _run(domain: Domain, run: list[int], mask: int, known: int) -> str:
    """One run of neighbours: "==4.36.2", "==4.36.*", "<2.3", ">=0.46,<0.50"."""
    first, last = run[0], run[-1]
    below = known & ((1 << first) - 1)
    above = known >> (last + 1) << (last + 1)
    ends = ",".join(part for part in (_lower(domain, first, below), _upper(domain, last, above)) if part)
    exact = f"=={domain.value(first)}"
    if first == last:
        candidates = [exact, ends] if below and above else sorted([ends, exact], key=len)
    else:
        series = _prefixes(domain, first) if below and above else []
        plain = [f">={domain.value(first)}"] * bool(below) + [f"<={domain.value(last)}"] * bool(above)
        candidates = [exact, *series, ends, ",".join(plain)]
    for text in candidates:
        if _reads(domain, text, known) == mask:
            return text
    return _cut([domain.value(position) or "" for position in run], ", ")


def _numbers(domain: Domain, position: int) -> tuple[str, list[str], Version]:
    """Epoch ("1!" or ""), release numbers as written, and the version at a position."""
    version = domain.version(position)
    epoch = f"{version.epoch}!" if version.epoch else ""
    return epoch, [str(number) for number in version.release], version


def _prefixes(domain: Domain, position: int) -> list[str]:
    """ "==4.*", "==4.36.*": all that could stand for a whole series, the shortest first."""
    epoch, numbers, _ = _numbers(domain, position)
    return [f"=={epoch}{'.'.join(numbers[:length])}.*" for length in range(1, len(numbers))]


def _round(domain: Domain, position: int, after: Version | None) -> str | None:
    """The shortest beginning, of two numbers or more, of a known version that still lies above the version `after`."""
    epoch, numbers, version = _numbers(domain, position)
    if not domain.exact:
        for length in range(min(2, len(numbers)), len(numbers) + 1):
            text = f"{epoch}{'.'.join(numbers[:length])}"
            if (after is None or Version(text) > after) and Version(text) <= version:
                return text
    return None


def _lower(domain: Domain, first: int, below: int) -> str:
    if not below:
        return ""
    previous = domain.version(below.bit_length() - 1)
    return f">={_round(domain, first, previous) or domain.value(first)}"


def _upper(domain: Domain, last: int, above: int) -> str:
    if not above:
        return ""
    following = (above & -above).bit_length() - 1
    text = _round(domain, following, domain.version(last))
    if text is None or (text == domain.value(following) and text.count(".") > 1):
        return f"<={domain.value(last)}"
    return f"<{text}"


def _without(domain: Domain, runs: list[list[int]], gaps: list[list[int]], known: int) -> str | None:
    """ ">=2.0,!=2.1.1": the hull of the runs without the gaps between them, where that can be said."""
    hull = [p for p in domain.positions(known) if runs[0][0] <= p <= runs[-1][-1]]
    text = "" if _mask(hull) == known else _run(domain, hull, _mask(hull), known)
    parts = [text] if text else []
    if text.startswith("=="):
        return None
    for gap in gaps:
        wanted = known & ~_mask(gap)
        shapes = [f"!={shape[2:]}" for shape in _prefixes(domain, gap[0])] if len(gap) > 1 else []
        shapes = [shape for shape in shapes if _reads(domain, shape, known) == wanted]
        if len(gap) > 1 and not shapes:
            shapes = [",".join(f"!={domain.value(position)}" for position in gap)]
        parts.append(shapes[0] if shapes else f"!={domain.value(gap[0])}")
    words = ",".join(parts)
    said = _mask(hull) & ~sum(_mask(gap) for gap in gaps)
    return words if len(gaps) <= PARTS and _reads(domain, words, known) == said else None


def _reads(domain: Domain, words: str, known: int) -> int:
    """What a specifier means; -1 for none (PEP 440 has no bounds with a local part)."""
    try:
        return domain.mask(words, prereleases=True) & known
    except InvalidSpecifier:
        return -1
