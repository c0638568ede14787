"""What the checks write down: one line of JSON as each check begins and ends, so that a crash loses nothing.

A stage process runs layer after layer and appends to an event file; the supervisor reads it while it waits. When
the process died, the last `begin` without an `end` names the check that it died in.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASS, FAIL, SKIP, WARN = "pass", "fail", "skip", "warn"
LAYERS = ("environment", "data", "chat", "training", "distributed", "effect")


class Fail(Exception):
    """Ends a check: it failed, and why."""


class Skip(Exception):
    """Ends a check: it could not be made here, and why."""


@dataclass
class Check:
    """One check: `id` is `layer.what`, `figures` are plain numbers and strings, `text` is for people."""

    id: str
    layer: str
    status: str = PASS
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process; what other programs take does not count
    error: str = ""  # end of the traceback, when something was raised

    def figure(self, **values: Any) -> None:
        """Record figures."""
        self.figures.update(values)

    def say(self, text: str) -> None:
        """The sentence of the report."""
        self.text = text

    def warn(self, text: str) -> None:
        """Not a failure, but to be known; may be said several times."""
        self.status = WARN
        self.text = f"{self.text}; {text}" if self.text else text

    @property
    def ok(self) -> bool:
        """Whether what depends on this check may go on."""
        return self.status in (PASS, WARN)


class Recorder:
    """Collects the checks of one layer and writes each to `sink` (a file) at once."""

    def __init__(self, layer: str, sink: Path | None = None) -> None:
        self.layer = layer
        self.sink = sink
        self.checks: list[Check] = []
        self.notes: dict[str, Any] = {}

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """One check. `Fail` and `Skip` end it; any other exception fails it and keeps the end of its traceback."""
        check = Check(id=f"{self.layer}.{name}", layer=self.layer)
        self._emit({"event": "begin", "id": check.id})
        start, burnt = time.monotonic(), time.process_time()
        try:
            yield check
        except Fail as stop:
            check.status, check.text = FAIL, str(stop)
            if stop.__cause__ is not None:
                check.error = ended(stop.__cause__)
        except Skip as stop:
            check.status, check.text = SKIP, str(stop)
        except (Exception, SystemExit) as error:
            check.status = FAIL
            check.text = f"{type(error).__name__}: {first_lines(str(error))}"
            check.error = ended(error)
        check.seconds = round(time.monotonic() - start, 3)
        check.cpu_seconds = round(time.process_time() - burnt, 3)
        self.checks.append(check)
        self._emit({"event": "end", "check": asdict(check)})

    def note(self, key: str, value: Any) -> None:
        """Something for the receipt that is not a check: an answer, the losses, versions."""
        self.notes[key] = value
        self._emit({"event": "note", "key": key, "value": value})

    def _emit(self, event: dict[str, Any]) -> None:
        if self.sink is not None:
            emit(self.sink, event)

    @property
    def failed(self) -> bool:
        """Whether any check failed so far."""
        return any(check.status == FAIL for check in self.checks)


def ended(error: BaseException) -> str:
    """The end of a traceback."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))[-6000:]


def first_lines(text: str, count: int = 3, width: int = 400) -> str:
    """The first lines of a message, on one line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    joined = " ".join(lines[:count])
    return joined if len(joined) <= width else joined[: width - 3] + "..."


@dataclass
class Story:
    """What the event file tells of one layer: `open_id` is the check that began and did not end, None when all did.

    began, ended: time.monotonic() of the stage process (one clock for all processes of a machine); `ended` is None
    while the layer runs, or when the process died in it. log_start: where in the log its output begins.
    """

    layer: str
    checks: list[Check] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    open_id: str | None = None
    began: float = 0.0
    ended: float | None = None
    log_start: int = 0


def emit(sink: Path, event: dict[str, Any]) -> None:
    """Append one event."""
    with sink.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event, default=str) + "\n")


def read_events(path: Path) -> list[Story]:
    """One story for each layer that began, in order; [] when nothing was written."""
    stories: list[Story] = []
    if not path.exists():
        return stories
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the process died while it wrote this line
        kind = event["event"]
        if kind == "layer" or not stories:
            stories.append(Story(str(event.get("layer", ""))))
        story = stories[-1]
        if kind == "layer":
            story.began, story.log_start = event["at"], event["log_start"]
        elif kind == "layer-end":
            story.ended = event["at"]
        elif kind == "begin":
            story.open_id = event["id"]
        elif kind == "end":
            story.checks.append(Check(**event["check"]))
            story.open_id = None
        elif kind == "note":
            story.notes[event["key"]] = event["value"]
    return stories


def progress(text: str) -> None:
    """A line for the person who waits; stdout is kept for the report."""
    print(text, file=sys.stderr, flush=True)
