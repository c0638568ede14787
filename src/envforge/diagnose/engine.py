"""One pass over a log: every candidate line goes to the patterns whose literal it holds; what they find is kept small."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from envforge.diagnose import facts as f
from envforge.diagnose.checks import CHECKS, Context
from envforge.diagnose.model import Confidence, Hit, Pattern, Rules
from envforge.diagnose.prefix import strip
from envforge.diagnose.scan import Candidate, scan
from envforge.diagnose.trackers import TRACKERS, Tracker

FIRST, LAST = 4, 2  # hits kept of one pattern
MAX_KEYS = 6  # distinct values of a `per` group that become findings of their own
MAX_WINDOWS = 600  # context windows that one pattern may ask for: they cost more than the line
SHOWN = 300  # characters of an evidence line

CaseKey = tuple[int, int]  # positions of rule and case


@dataclass(slots=True)
class Tally:
    """What one case saw: a count, the first and last hits."""

    count: int = 0
    first: list[Hit] = field(default_factory=list)
    last: deque[Hit] = field(default_factory=lambda: deque(maxlen=LAST))

    def add(self, hit: Hit) -> None:
        self.count += 1
        if self.first and self.first[-1].line == hit.line and self.first[-1].text == hit.text:
            return
        if len(self.first) < FIRST:
            self.first.append(hit)
        else:
            self.last.append(hit)

    @property
    def hits(self) -> list[Hit]:
        """First and last ones, in order."""
        return [*self.first, *self.last]


@dataclass(slots=True)
class Seen:
    """Everything that the pass kept."""

    cases: dict[CaseKey, dict[str, Tally]] = field(default_factory=dict)
    signals: dict[str, Tally] = field(default_factory=dict)
    lines: int = 0


class _Probe:
    """A pattern at work."""

    __slots__ = ("check", "compiled", "near", "pattern", "per", "unless", "used", "where", "windows")

    def __init__(self, pattern: Pattern, where: CaseKey | str, check: str | None = None, per: str | None = None) -> None:
        self.pattern, self.where, self.check, self.per = pattern, where, check, per
        self.compiled: re.Pattern[str] | None = None
        self.near: re.Pattern[str] | None = None
        self.unless: re.Pattern[str] | None = None
        self.windows = 0
        self.used = 0

    def look(self, line: Candidate, text: str, rank: str | None) -> tuple[str, Hit] | None:
        """(key, hit) when the line is meant."""
        if self.compiled is None:  # most patterns never see a line
            self.compiled = re.compile(self.pattern.re, re.IGNORECASE)
            self.near = re.compile(self.pattern.near, re.IGNORECASE) if self.pattern.near else None
            self.unless = re.compile(self.pattern.unless, re.IGNORECASE) if self.pattern.unless else None
        found = self.compiled.search(text)
        if not found:
            return None
        if self.near or self.unless:
            if self.windows >= MAX_WINDOWS:
                return None
            self.windows += 1
            window = line.around(self.pattern.before, self.pattern.after)
            if (self.near and not self.near.search(window)) or (self.unless and self.unless.search(window)):
                return None
        groups = {name: value for name, value in found.groupdict().items() if value}
        confidence: str | None = None
        if self.check:
            if self.windows >= MAX_WINDOWS * 2:
                return None
            self.windows += 1
            extra = CHECKS[self.check](Context(found, text, line.around))
            if extra is None:
                return None
            groups |= extra
            confidence = groups.pop("confidence", None)
        key = groups.get(self.per, "") if self.per else ""
        return key, Hit(line.number, excerpt(text, found), groups, rank, cast("Confidence | None", confidence))


def run(stream: BinaryIO, rules: Rules, facts: f.Facts) -> Seen:
    """Read the whole stream once; `facts` takes what the log says of versions and devices."""
    seen = Seen()
    probes: dict[str, list[_Probe]] = {}
    readings: dict[str, list[tuple[f.Reading, re.Pattern[str]]]] = {}
    trackers: dict[str, list[Tracker]] = {}
    owners: list[tuple[CaseKey, Tracker]] = []
    for name, patterns in rules.signals.items():
        for pattern in patterns:
            probes.setdefault(pattern.literal, []).append(_Probe(pattern, name))
    for i, rule in enumerate(rules.rules):
        for j, case in enumerate(rule.cases):
            for pattern in case.patterns:
                probes.setdefault(pattern.literal, []).append(_Probe(pattern, (i, j), case.check, case.per))
            if case.tracker:
                tracker = TRACKERS[case.tracker]()
                owners.append(((i, j), tracker))
                for literal in tracker.literals:
                    trackers.setdefault(literal, []).append(tracker)
    for reading in f.readings():
        readings.setdefault(reading.literal, []).append((reading, re.compile(reading.re, re.IGNORECASE)))
    literals = sorted({*probes, *readings, *trackers})
    counts: dict[int, int] = {}
    for line in scan(stream, [literal.encode() for literal in literals]):
        seen.lines = line.number
        text, rank = strip(line.text)
        fed: list[Tracker] = []
        for index in line.literals:
            literal = literals[index]
            for probe in probes.get(literal, ()):
                result = probe.look(line, text, rank)
                if result:
                    _keep(seen, probe.where, *result)
            for tracker in trackers.get(literal, ()):
                if tracker not in fed:
                    fed.append(tracker)
                    tracker.feed(line.number, text, rank)
            for reading, compiled in readings.get(literal, ()):
                if counts.get(id(reading), 0) < f.MAX_HITS:
                    counts[id(reading)] = counts.get(id(reading), 0) + 1
                    for match in _some(compiled.finditer(text), 4):
                        facts.take(match.groupdict(), reading.weight, text)
    for where, tracker in owners:
        for hit in tracker.hits():
            _keep(seen, where, "", hit)
    return seen


def _some(matches: Iterable[re.Match[str]], count: int) -> Iterable[re.Match[str]]:
    for _, match in zip(range(count), matches, strict=False):
        yield match


def _keep(seen: Seen, where: CaseKey | str, key: str, hit: Hit) -> None:
    if isinstance(where, str):
        seen.signals.setdefault(where, Tally()).add(hit)
        return
    keyed = seen.cases.setdefault(where, {})
    if key not in keyed and len(keyed) >= MAX_KEYS:
        return
    keyed.setdefault(key, Tally()).add(hit)


def excerpt(text: str, found: re.Match[str]) -> str:
    """A readable piece of the line around the match: no control characters, at most SHOWN characters."""
    text, low, high = text.strip("\n"), found.start(), found.end()
    if len(text) > SHOWN:
        start = max(0, min(low - 40, high - SHOWN + 20))
        text = ("..." if start else "") + text[start : start + SHOWN] + ("..." if start + SHOWN < len(text) else "")
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text).strip()
