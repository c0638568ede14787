"""Quantities over a log: memory that climbs, levels off, or only wavers; few points and very many."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from envforge.diagnose.trackers import BUCKETS, MAX_POINTS, GradRecovers, MemoryCreep, StillLoss, _Series


def verdict(values: list[float], line: Callable[[int, float], str] | None = None) -> str | None:
    tracker = MemoryCreep()
    for number, value in enumerate(values, 1):
        tracker.feed(number, line(number, value) if line else f"step {number} memory_allocated {value:.3f} GiB", None)
    hits = tracker.hits()
    return hits[0].confidence if hits else None


def noisy(count: int, slope: float) -> list[float]:
    rng = random.Random(3)
    return [20 + slope * n / count + rng.random() / 2 for n in range(count)]


def test_climb_is_seen_and_a_level_is_not() -> None:
    assert verdict([11.4, 12.3, 13.2, 14.1, 15.0, 15.9]) == "likely"
    assert verdict([11.4] * 10) is None
    assert verdict([4.1, 11.2, 11.9, 11.95, 11.95, 11.96]) is None  # warm-up
    assert verdict([11.1, 12.9, 11.2, 13.4, 11.1]) is None
    assert verdict([10.0, 12.0, 14.0]) == "possible"
    assert verdict([10.0, 12.0]) is None


def test_free_memory_that_shrinks_is_a_climb() -> None:
    assert verdict([20, 18, 16, 14, 12, 10], lambda n, v: f"step {n} free memory {v:.1f} GiB") == "likely"


def test_peaks_need_more() -> None:
    curve = [10, 12, 13, 13.8, 14.5, 15.1, 15.7]
    assert verdict(curve) in ("likely", "possible")
    assert verdict(curve, lambda n, v: f"step {n} max_memory_allocated {v:.1f} GiB") is None


@pytest.mark.parametrize(("slope", "wanted"), [(0.0, None), (20.0, "likely")])
def test_long_and_noisy(slope: float, wanted: str | None) -> None:
    assert verdict(noisy(20_000, slope)) == wanted


def test_points_are_bounded_and_spread() -> None:
    series = _Series()
    for number in range(50_000):
        series.add(number, float(number), "x")
    assert len(series.points) <= MAX_POINTS
    assert len(series.levels()) == BUCKETS
    gaps = [later[0] - earlier[0] for earlier, later in zip(series.points, series.points[1:], strict=False)]
    assert max(gaps) <= 4 * min(gaps)


def test_an_oom_message_is_no_report() -> None:
    assert (
        verdict([1, 2, 3, 4, 5], lambda n, v: f"CUDA out of memory. Tried to allocate {v} GiB, {v} GiB allocated")
        is None
    )


def test_still_loss() -> None:
    tracker = StillLoss()
    for number in range(4):
        tracker.feed(number, "{'loss': 2.4113, 'grad_norm': 0.0, 'learning_rate': 0.0002}", None)
    assert tracker.hits()[0].confidence == "likely"
    moving = StillLoss()
    for number in range(4):
        moving.feed(number, "{'loss': 2.4113, 'grad_norm': 0.021, 'learning_rate': 0.0002}", None)
    assert not moving.hits()


def test_recovery_is_the_last_word() -> None:
    tracker = GradRecovers()
    tracker.feed(1, "'grad_norm': 1.0", None)
    tracker.feed(2, "'grad_norm': nan", None)
    assert not tracker.hits()
    tracker.feed(3, "'grad_norm': 0.7", None)
    assert tracker.hits()
