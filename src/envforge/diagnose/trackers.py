"""Trackers look at many lines of a healthy-looking log and judge them together at the end."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from envforge.diagnose.model import Confidence, Hit

MAX_SERIES = 48
MAX_POINTS = 256
DENSE = 3_000  # lines that a tracker takes one by one; afterwards every THIN-th (a prime: ranks take turns)
THIN = 11

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

    @abstractmethod
    def feed(self, number: int, text: str, rank: str | None) -> None:
        """One line that holds one of the literals."""

    @abstractmethod
    def hits(self) -> list[Hit]:
        """The verdict: hits with a confidence, or none."""


@dataclass(slots=True)
class _Series:
    """One quantity over time: bounded points (thinned out evenly) and exact counts."""

    points: list[tuple[int, float, str]] = field(default_factory=list)
    last: tuple[int, float, str] | None = None
    stride: int = 1
    seen: int = 0
    ups: int = 0
    downs: int = 0

    def add(self, number: int, value: float, text: str) -> None:
        if self.last is not None:
            self.ups += value > self.last[1]
            self.downs += value < self.last[1]
        self.last = (number, value, text)
        if self.seen % self.stride == 0:
            self.points.append(self.last)
            if len(self.points) > MAX_POINTS:
                del self.points[1::2]
                self.stride *= 2
        self.seen += 1

    def all(self) -> list[tuple[int, float, str]]:
        ends_with_last = self.last is None or self.points[-1][0] == self.last[0]
        return self.points if ends_with_last else [*self.points, self.last]  # type: ignore[list-item]


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

    def feed(self, number: int, text: str, rank: str | None) -> None:
        """Collect every quantity of memory on the line."""
        self.fed += 1
        if self.fed > DENSE and self.fed % THIN:
            return
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
            points = series.all()
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
    points = [value for _, value, _ in series.all()]
    if series.seen < 3 or series.downs > 0.1 * series.seen or series.ups < 0.6 * (series.seen - 1):
        return None
    growth = points[-1] - points[0]
    if growth < max(102.0, 0.04 * abs(points[0])):
        return None
    half = points[len(points) // 2]
    if points[-1] - half < 0.3 * growth:  # levels off: warm-up, or a cache that has filled
        return None
    fit = _linear(points)
    if series.seen == 3:
        return "possible" if fit > 0.98 and growth > 0.1 * abs(points[0]) else None
    if fit > (0.985 if peak else 0.97):
        return "likely"
    return "possible" if not peak and series.seen >= 6 else None


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
