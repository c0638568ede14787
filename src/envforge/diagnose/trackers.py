"""Trackers look at many lines of a healthy-looking log and judge them together at the end."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from envforge.diagnose.model import Confidence, Hit

MAX_SERIES = 48
MAX_POINTS = 256
BUCKETS = 16
DENSE = 3_000  # lines that a tracker takes one by one; afterwards the last one of each block is enough for a trend

_UNITS = {"gib": 1024.0, "gb": 1024.0, "g": 1024.0, "mib": 1.0, "mb": 1.0, "m": 1.0}
_NUMBER = r"\d{1,7}(?:\.\d{1,4})?"
_VALUE = re.compile(
    rf"(?P<before>[^\d\n]{{0,48}})(?<![\d.])(?P<value>{_NUMBER})"
    rf"(?:\s?(?P<unit>[GM]i?B)\b|\s?(?:of|/)\s?{_NUMBER}\s?(?P<part>[GM]i?B)\b)(?P<after>[ \w]{{0,16}})",
    re.IGNORECASE,
)
_BARE = re.compile(
    r"(?P<before>\b(?:gpu_|cuda_)?mem(?:ory)?(?:_?used|_?usage|_?allocated)?)\s*(?:\((?P<unit>[GM]i?B)\))?[\"']?\s*[:=]\s*"
    r"(?P<value>\d+(?:\.\d+)?)(?![\d.]*\s*(?:[GM]i?B|%|/))",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"mem|vram|alloc|reserved|in use|gpu used", re.IGNORECASE)
_NOT_A_SERIES = re.compile(
    r"tried to allocate|out of memory|total capac|is free|host memory|shared memory|\bram\b|estimated|needs|requires",
    re.IGNORECASE,
)


class Tracker(ABC):
    """Feeds on lines, then answers with at most a few hits."""

    literals: tuple[str, ...] = ()

    @property
    def satisfied(self) -> bool:
        """Only the last line of each block is wanted from now on."""
        return False

    @abstractmethod
    def feed(self, number: int, text: str, rank: str | None) -> None:
        """One line that holds one of the literals."""

    @abstractmethod
    def hits(self) -> list[Hit]:
        """The verdict: hits with a confidence, or none."""


Point = tuple[int, float, str]  # line, MiB, text


@dataclass(slots=True)
class _Series:
    """One quantity over the log: at most MAX_POINTS points, evenly spread over the lines, each the lowest of its
    stretch (the level to which memory returns, not the peaks of long batches)."""

    points: list[Point] = field(default_factory=list)
    last: Point | None = None
    gap: int = 0  # lines between two points
    seen: int = 0

    def add(self, number: int, value: float, text: str) -> None:
        self.seen += 1
        self.last = (number, value, text)
        self._put(self.last)
        if len(self.points) > MAX_POINTS:
            self.gap = max(2 * self.gap, 2 * (number - self.points[0][0]) // MAX_POINTS, 1)
            thick, self.points = self.points, []
            for point in thick:
                self._put(point)

    def _put(self, point: Point) -> None:
        if self.points and point[0] - self.points[-1][0] < self.gap:
            if point[1] < self.points[-1][1]:
                self.points[-1] = (self.points[-1][0], point[1], point[2])
            return
        self.points.append(point)

    def levels(self) -> list[Point]:
        """The points, or, where there are many, the lowest of each of BUCKETS equal stretches of the log."""
        if len(self.points) < 2 * BUCKETS:
            ends_with_last = self.last is None or self.points[-1][0] == self.last[0]
            return self.points if ends_with_last else [*self.points, self.last]  # type: ignore[list-item]
        first, span = self.points[0][0], self.points[-1][0] - self.points[0][0] + 1
        lowest: dict[int, Point] = {}
        for point in self.points:
            bucket = (point[0] - first) * BUCKETS // span
            if bucket not in lowest or point[1] < lowest[bucket][1]:
                lowest[bucket] = point
        return [lowest[bucket] for bucket in sorted(lowest)]


class MemoryCreep(Tracker):
    """GPU memory that climbs from report to report and does not level off."""

    literals: tuple[str, ...] = (
        "allocated", "memory:", "memory=", "memory(", "memory used", "memory usage", "gpu mem", "gpu_mem", "mem=",
        "mem:", "vram", "memory_", 'memory":', "memory':", "gpu memory", "cuda memory", "memory in use", "gib in use",
        "gb in use", "mib in use", "memory after", "memory at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], _Series] = {}
        self.fed = 0

    @property
    def satisfied(self) -> bool:
        """Dense at first, sparse once there is enough for a trend."""
        return self.fed >= DENSE

    def feed(self, number: int, text: str, rank: str | None) -> None:
        """Collect every quantity of memory on the line."""
        self.fed += 1
        if _NOT_A_SERIES.search(text):
            return
        for found in (*_VALUE.finditer(text), *_BARE.finditer(text)):
            groups = found.groupdict()
            before, after = groups["before"], groups.get("after") or ""
            unit = (groups.get("unit") or groups.get("part") or "mb").lower()
            key = (
                re.sub(r"[\W_]+", " ", before[-28:]).strip().lower() or re.sub(r"[\W\d_]+", " ", after).strip().lower()
            )
            if not _MEMORY.search(before + " " + after):
                continue
            slot = (rank or "", key)
            if slot not in self.series and len(self.series) >= MAX_SERIES:
                continue
            value = float(found["value"]) * _UNITS[unit]
            self.series.setdefault(slot, _Series()).add(number, -value if "free" in key else value, text)

    def hits(self) -> list[Hit]:
        """The clearest climbing series: first, middle and last line of it."""
        best: tuple[int, float, list[Hit]] | None = None
        for (rank, key), series in self.series.items():
            confidence = _climbs(series, peak=bool(re.search(r"max|peak", key)))
            if confidence is None:
                continue
            points = series.levels()
            growth = points[-1][1] - points[0][1]
            groups = {
                "grown": f"{growth / 1024:.2f} GiB",
                "first_value": f"{abs(points[0][1]) / 1024:.2f} GiB",
                "last_value": f"{abs(points[-1][1]) / 1024:.2f} GiB",
                "reports": str(series.seen),
            }
            shown = [points[0], points[len(points) // 2], points[-1]]
            hits = [Hit(number, text.strip()[:300], groups, rank or None, confidence) for number, _, text in shown]
            weight = {"possible": 0, "likely": 1, "certain": 2}[confidence]
            if best is None or (weight, growth) > best[:2]:
                best = (weight, growth, hits)
        return best[2] if best else []


def _climbs(series: _Series, peak: bool) -> Confidence | None:
    values = [value for _, value, _ in series.levels()]
    steps = [later - earlier for earlier, later in pairwise(values)]
    if len(values) < 3 or sum(step < 0 for step in steps) > 0.1 * len(steps):
        return None
    growth = values[-1] - values[0]
    if sum(step > 0 for step in steps) < 0.6 * len(steps) or growth < max(102.0, 0.04 * abs(values[0])):
        return None
    if values[-1] - values[len(values) // 2] < 0.3 * growth:  # levels off: warm-up, or a cache that has filled
        return None
    fit = _linear(values)
    if len(values) == 3:
        return "possible" if fit > 0.98 and growth > 0.1 * abs(values[0]) else None
    if fit > (0.985 if peak else 0.97):
        return "likely"
    return "possible" if not peak and len(values) >= 6 else None


def _linear(values: list[float]) -> float:
    """R squared of a straight line through the values."""
    n = len(values)
    mean_x, mean_y = (n - 1) / 2, sum(values) / n
    xx = sum((i - mean_x) ** 2 for i in range(n))
    xy = sum((i - mean_x) * (v - mean_y) for i, v in enumerate(values))
    yy = sum((v - mean_y) ** 2 for v in values)
    return 0.0 if yy == 0 else xy * xy / (xx * yy)


class StillLoss(Tracker):
    """A training loss that is printed with the very same digits again and again while a gradient norm is zero."""

    literals: tuple[str, ...] = (
        "grad_norm': 0.0,",
        "grad_norm': 0,",
        'grad_norm": 0.0,',
        "grad_norm': 0.0}",
        "grad_norm=0.0",
        "grad_norm: 0.0",
    )

    def __init__(self) -> None:
        self.lines: list[Hit] = []
        self.losses: set[str] = set()
        self.count = 0

    def feed(self, number: int, text: str, rank: str | None) -> None:
        """One report whose gradient norm may be exactly zero."""
        if not re.search(r"grad_norm['\"]?\s*[:=]\s*0(?:\.0+)?(?![\d.e])", text):
            return
        self.count += 1
        loss = re.search(r"(?<![a-z_])loss['\"]?\s*[:=]\s*([\d.]+)", text)
        if loss and len(self.losses) < 50:
            self.losses.add(loss[1])
        if len(self.lines) < 3:
            self.lines.append(Hit(number, text.strip()[:300], {}, rank))

    def hits(self) -> list[Hit]:
        """Three or more reports with a zero gradient."""
        if self.count < 3:
            return []
        sure: Confidence = "likely" if len(self.losses) <= max(1, self.count // 10) else "possible"
        return [Hit(h.line, h.text, {"reports": str(self.count)}, h.rank, sure) for h in self.lines]


class _Recovers(Tracker):
    """Whether the last report of a quantity is a finite number: one or two skipped steps are no trouble.

    Only the last line of each block is shown to it, which is enough and costs nothing.
    """

    value: re.Pattern[str]

    def __init__(self) -> None:
        self.last: Hit | None = None

    def feed(self, number: int, text: str, rank: str | None) -> None:
        """One report."""
        found = self.value.search(text)
        if found:
            finite = not found[1].lower().startswith(("nan", "inf", "-inf"))
            self.last = Hit(number, text.strip()[:300], {}, rank) if finite else None

    def hits(self) -> list[Hit]:
        """The last report, when it is a finite number."""
        return [self.last] if self.last else []


class GradRecovers(_Recovers):
    """The gradient norm."""

    literals: tuple[str, ...] = ("grad_norm", "grad norm")
    value = re.compile(r"grad[_ ]norm['\"]?\s*[:=]?\s*(?:tensor\()?([\w.+-]+)", re.IGNORECASE)


class LossRecovers(_Recovers):
    """The loss."""

    literals: tuple[str, ...] = ("'loss'", '"loss"', " loss:", " loss=", " loss ")
    value = re.compile(r"(?<![a-z_])loss['\"]?\s*[:=]?\s*(?:tensor\()?((?:nan|-?inf|[\d.+-])[\w.+-]*)", re.IGNORECASE)


# Trackers that answer a condition instead of making a finding.
SIGNAL_TRACKERS: Mapping[str, type[Tracker]] = {"grad-recovers": GradRecovers, "loss-recovers": LossRecovers}
TRACKERS: Mapping[str, type[Tracker]] = {"memory-creep": MemoryCreep, "still-loss": StillLoss}
