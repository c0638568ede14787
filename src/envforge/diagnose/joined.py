"""Several files of one run read as one log, with each line still known by its own file and number."""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO, cast

from envforge.diagnose.model import Hit, Report

_RANK = re.compile(r"rank(\d+)")
Source = tuple[str, BinaryIO]  # name, open stream


class Joined(io.RawIOBase):
    """The streams one behind another. Each is closed when it has been read, and ends with a line break."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._left = list(sources)
        self._lines = 1
        self._broken = True  # the last byte was a line break
        self.names: list[str] = []
        self.starts: list[int] = []  # number of the first line of each, in the whole
        self._begin()

    def _begin(self) -> None:
        if self._left:
            self.names.append(self._left[0][0])
            self.starts.append(self._lines)

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes: never of two files at once."""
        while self._left:
            block = self._left[0][1].read(size if size and size > 0 else 1 << 19)
            if block:
                self._lines += block.count(b"\n")
                self._broken = block.endswith(b"\n")
                return block
            self._left.pop(0)[1].close()
            ended, self._broken = self._broken, True
            if not ended:
                self._lines += 1
            self._begin()
            if not ended:
                return b"\n"
        return b""

    def place(self, line: int) -> tuple[str, int]:
        """(file, number in it) of a line of the whole."""
        at = max(bisect_right(self.starts, line) - 1, 0)
        # A file without lines begins where the next one does; the last of those is the one with the line.
        return self.names[at], line - self.starts[at] + 1


def located(report: Report, joined: Joined) -> Report:
    """The report with each evidence line named by its file, and by its rank where the file's name tells it."""

    def placed(hit: Hit) -> Hit:
        name, line = joined.place(hit.line)
        rank = _RANK.search(name)
        return replace(hit, file=name, line=line, rank=hit.rank or (rank[1] if rank else None))

    findings = tuple(replace(found, evidence=tuple(map(placed, found.evidence))) for found in report.findings)
    return replace(report, findings=findings)


def joined(sources: Sequence[Source]) -> tuple[Joined, BinaryIO]:
    """The joined streams, and the same as what a reader of logs takes."""
    whole = Joined(sources)
    return whole, cast(BinaryIO, whole)
