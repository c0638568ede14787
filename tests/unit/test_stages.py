"""Bytes and time left, out of what a build and a bundle report. The clock is stood in for."""

from __future__ import annotations

import io

import pytest

from envforge.cli.stages import Meter, stage_printer
from envforge.image.values import Event


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_bytes_and_time_left_come_from_what_uv_says() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.feed(Event("stage", "200 MB to download", total=200 * 2**20))
    assert (meter.words(), meter.left) == ("", None)
    meter.feed(Event("line", "#8 0.415 Downloading torch (100.0MiB)"))
    meter.feed(Event("line", "#8 0.416 Downloading numpy (50.0MiB)"))
    assert meter.left is None
    clock.now = 30
    meter.feed(Event("line", "#8 30.1  Downloaded numpy"))
    assert (meter.done, meter.left) == (50 * 2**20, 90)
    assert meter.words() == "52 of 210 MB, about 1:30 left"
    clock.now = 60
    meter.feed(Event("line", "#8 60.2  Downloaded torch"))
    assert meter.left == 20
    # The same name in the middle of other words is none.
    meter.feed(Event("line", "Downloaded torch, and more"))
    meter.feed(Event("stage", "writing the image"))
    assert (meter.stage, meter.done) == ("writing the image", 150 * 2**20)


def test_bytes_of_files_that_are_fetched_one_by_one() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.feed(Event("stage", "2 wheels", total=100))
    for name, done in (("a", 10), ("a", 40), ("b", 10)):
        clock.now += 5
        meter.feed(Event("line", name, done, 50))
    assert (meter.done, meter.left) == (50, 10)
    meter.feed(Event("stage", "3 wheels", total=7))
    assert (meter.done, meter.words()) == (0, "")


def test_more_than_was_announced_is_not_more_than_all() -> None:
    meter = Meter(Clock())
    meter.feed(Event("stage", "x", total=10))
    meter.feed(Event("line", "a", 50))
    assert (meter.done, meter.left) == (10, 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_stages_are_lines_and_markup_is_text(out: io.StringIO) -> None:
    with stage_printer(out) as progress:
        progress(Event("stage", "installing [red]torch[/nonsense]"))
        progress(Event("line", "#8 1.0 [/x] Downloading torch (1.0MiB)"))
        progress(Event("stage", "proving it (full)"))
        progress(Event("line", "ok chat"))
    text = out.getvalue()
    assert "installing [red]torch[/nonsense]" in text
    assert "proving it (full)" in text
    if not out.isatty():
        assert "  ok chat" in text
        assert "\x1b" not in text
