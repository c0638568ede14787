"""The progress of a build: a live line with stage, bytes and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from envforge.image.values import Event, Progress

# What uv says of wheels above a megabyte while it installs, behind the builder's own step number.
_BEGUN = re.compile(r"(?:^|\s)Downloading (\S+) \(([\d.]+)([KMG]iB)\)$")
_DONE = re.compile(r"(?:^|\s)Downloaded (\S+)$")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Meter:
    """Counts bytes out of the events of a build or a bundle: what is there, out of how much, and for how long yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.total = 0
        self.stage = "starting"
        self._moved: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._start: float | None = None

    def feed(self, event: Event) -> None:
        """Take an event in."""
        if event.kind == "stage":
            self.stage = event.text
            if event.total is not None:  # a new amount of work is announced
                self.total, self._moved, self._sizes, self._start = event.total, {}, {}, None
            return
        if event.done is not None:
            self._set(event.text, event.done)
        elif begun := _BEGUN.search(event.text):
            self._sizes[begun[1]] = int(float(begun[2]) * _UNITS[begun[3]])
            self._set(begun[1], 0)
        elif done := _DONE.search(event.text):
            self._set(done[1], self._sizes.get(done[1], 0))

    def _set(self, name: str, done: int) -> None:
        if self._start is None:
            self._start = self.clock()
        self._moved[name] = done

    @property
    def done(self) -> int:
        """Bytes so far; never more than the total, which is exact only for whole files."""
        moved = sum(self._moved.values())
        return min(moved, self.total) if self.total else moved

    @property
    def left(self) -> float | None:
        """Seconds to go at the speed so far; None while nothing can be said."""
        if self._start is None or not self.total or not self.done:
            return None
        return (self.clock() - self._start) * (self.total - self.done) / self.done

    def words(self) -> str:
        """Bytes and time left for people; empty before the first byte."""
        if self._start is None:
            return ""
        of = f" of {self.total / 1e6:,.0f}" if self.total else ""
        left = self.left
        more = f", about {int(left) // 60}:{int(left) % 60:02d} left" if left is not None and self.done else ""
        return f"{self.done / 1e6:,.0f}{of} MB{more}"


@contextlib.contextmanager
def stage_printer(out: TextIO) -> Iterator[Progress]:
    """Progress for people: a live line on a terminal, one line a stage elsewhere. The proof's own lines are shown."""
    start = time.monotonic()

    def mark() -> str:
        seconds = int(time.monotonic() - start)
        return f"[{seconds // 60}:{seconds % 60:02d}]"

    if not out.isatty():
        proving = False

        def plain(event: Event) -> None:
            nonlocal proving
            if event.kind == "stage":
                proving = event.text.startswith("proving")
                print(f"{mark()} {event.text}", file=out, flush=True)
            elif proving:
                print(f"  {event.text}", file=out, flush=True)

        yield plain
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out)
    meter = Meter()
    with console.status("starting", spinner="line") as status:

        def live(event: Event) -> None:
            meter.feed(event)
            if event.kind == "stage":
                console.print(Text(f"{mark()} {event.text}"), highlight=False)
            words = " ".join(word for word in (meter.stage, mark(), meter.words()) if word)
            if event.kind == "line" and event.done is None and event.text.strip():
                words += f" {event.text.strip()}"
            status.update(Text(words[: max(20, console.width - 4)]))

        yield live
