"""The progress of a build on a terminal, and as plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from envforge.image.values import Event, Progress


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
    from rich.markup import escape

    console = Console(file=out)
    stage = "starting"
    with console.status(stage, spinner="line") as status:

        def live(event: Event) -> None:
            nonlocal stage
            if event.kind == "stage":
                stage = event.text
                console.print(f"{mark()} {escape(stage)}", highlight=False)
                status.update(escape(stage))
            elif event.text.strip():
                room = max(20, console.width - len(stage) - 16)
                status.update(f"{escape(stage)} {mark()} {escape(event.text.strip()[:room])}".replace("[/", "\\[/"))

        yield live
