"""Reads a log of any size once, in bounded memory, and hands over only the lines that may matter.

A log is bytes: several ranks interleaved, progress bars that rewrite their line with carriage returns, colour codes,
broken UTF-8, lines of megabytes. One Aho-Corasick pass over lower-cased blocks finds the plain text that the rules
need (see `literals`); everything else of the block is only searched by C code and forgotten.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import ahocorasick_rs

BLOCK = 1 << 19
MAX_LINE = 1 << 20  # a longer line is taken in pieces
LOOK_AROUND = 12_000  # bytes of context kept on both sides of a line
SHOWN = 4_096  # bytes of one line that a pattern is shown, around the hit
LARGE = 4 << 20  # bytes after which the faster automaton is built
OVERLAP = 256  # bytes searched again where a line had to be cut: longer than any literal
_ANSI = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>78])")
_ENCODINGS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(slots=True)
class Candidate:
    """One line that holds at least one literal: its 1-based number, its text, and the literals' positions."""

    number: int
    text: str
    literals: set[int]
    window: bytes
    start: int
    end: int

    def around(self, before: int, after: int) -> str:
        """The line with so many lines above and below it, joined by newlines; at most LOOK_AROUND bytes each way."""
        first, last = self.start, self.end
        floor, ceiling = max(0, first - LOOK_AROUND), min(len(self.window), last + LOOK_AROUND)
        for _ in range(before):
            if first <= floor:
                break
            first = _line_start(self.window, first - 1)
        for _ in range(after):
            if last >= ceiling:
                break
            last = _line_end(self.window, last + 1)
        return _decode(self.window[max(first, floor) : min(last, ceiling)])


@lru_cache(maxsize=2)
def _automaton(literals: tuple[bytes, ...], large: bool) -> ahocorasick_rs.BytesAhoCorasick:
    """A DFA reads thrice as fast and takes six times as long to build, which a large log pays back."""
    import ahocorasick_rs

    kinds = ahocorasick_rs.Implementation
    return ahocorasick_rs.BytesAhoCorasick(list(literals), implementation=kinds.DFA if large else kinds.ContiguousNFA)


class _Machine:
    """The automaton over the literals that are still searched everywhere. Of the others (`known`: so many hits that
    more say nothing new) only the last one of each block is looked up, for the evidence."""

    def __init__(self, literals: Sequence[bytes], known: set[int], large: bool) -> None:
        self.size = len(known)
        self.large = large
        self.active = [i for i in range(len(literals)) if i not in known]
        self.rare = [(i, literals[i]) for i in known]
        self.automaton = _automaton(tuple(literals[i] for i in self.active), large)

    def hits(self, block: bytes) -> list[tuple[int, int]]:
        """(position in the block, literal), ordered by position."""
        active = self.active
        found = [(low, active[i]) for i, low, _ in self.automaton.find_matches_as_indexes(block, overlapping=True)]
        for i, literal in self.rare:
            at = block.rfind(literal)
            if at >= 0:
                found.append((at, i))
        found.sort()
        return found


def scan(stream: BinaryIO, literals: Sequence[bytes], known: set[int] | None = None) -> Iterator[Candidate]:
    """Candidates in the order of their lines.

    Args:
        stream: the log; a compressed one is opened by the caller.
        literals: lower-case ASCII texts shorter than OVERLAP; `Candidate.literals` holds their positions.
        known: positions of literals that the caller has seen often enough; it may grow while the scan runs.
    """
    known = set() if known is None else known
    machine = _Machine(literals, known, large=False)
    total = 0
    window = b""
    number = 1  # line number at the start of `window`
    done = 0  # bytes of `window` whose hits were handed over
    for block, last in _blocks(stream):
        window += block
        total += len(block)
        limit = len(window) if last else _line_start(window, max(0, len(window) - LOOK_AROUND))
        if limit <= done and len(window) - done > MAX_LINE:  # one endless line
            limit = len(window) - LOOK_AROUND
        if limit > done:
            if machine.size != len(known) or (total > LARGE and not machine.large):
                machine = _Machine(literals, known, large=total > LARGE)
            yield from _lines(window, done, number, machine.hits(window[done:limit].lower()))
            whole = window[limit - 1 : limit] in (b"\n", b"\r")
            done = limit if whole else max(done, limit - OVERLAP)
        keep = max(0, done - LOOK_AROUND)
        start = _line_start(window, keep)
        keep = start if keep - start < LOOK_AROUND else keep
        number += window.count(b"\n", 0, keep)
        window, done = window[keep:], done - keep


def _lines(window: bytes, base: int, number: int, hits: list[tuple[int, int]]) -> Iterator[Candidate]:
    """Group the hits of one stretch by line."""
    counted = 0
    start = end = -1
    first = 0
    found: set[int] = set()
    for low, literal in hits:
        at = base + low
        if at >= end:
            if found:
                number += window.count(b"\n", counted, start)
                counted = start
                yield _candidate(window, start, end, first, number, found)
            start, end, first, found = _line_start(window, at), _line_end(window, at), at, set()
        found.add(literal)
    if found:
        number += window.count(b"\n", counted, start)
        yield _candidate(window, start, end, first, number, found)


def _candidate(window: bytes, start: int, end: int, hit: int, number: int, found: set[int]) -> Candidate:
    if end - start > SHOWN:
        start = max(start, hit - SHOWN // 2)
        end = min(end, start + SHOWN)
    return Candidate(number, _decode(window[start:end]), found, window, start, end)


def _decode(raw: bytes) -> str:
    """Text for patterns. JSON log lines (docker's json-file, structured loggers) lose their escaping."""
    text = raw.decode("utf-8", "replace").replace("\x00", "")
    if text.startswith("{") and "\\" in text:
        text = text.replace('\\"', '"').replace("\\n", "\n").replace("\\t", " ").replace("\\\\", "\\")
    return text


def _line_start(window: bytes, at: int) -> int:
    newline = window.rfind(b"\n", 0, at) + 1
    return max(newline, window.rfind(b"\r", newline, at) + 1)


def _line_end(window: bytes, at: int) -> int:
    """End of the line that `at` is in, without its break."""
    newline = window.find(b"\n", at)
    newline = len(window) if newline < 0 else newline
    rewrite = window.find(b"\r", at, newline)
    return newline if rewrite < 0 else rewrite


def _blocks(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Cleaned blocks that end at a line break (or at MAX_LINE), each with "this is the last one"."""
    rest = b""
    for block in _utf8(stream):
        rest += block
        cut = max(rest.rfind(b"\n"), rest.rfind(b"\r", 0, len(rest) - 1)) + 1
        if cut == 0 and len(rest) >= MAX_LINE:
            cut = len(rest) - 64  # no colour code and no rune is torn apart
        if cut:
            yield _clean(rest[:cut]), False
            rest = rest[cut:]
    yield _clean(rest), True


def _clean(raw: bytes) -> bytes:
    if b"\x1b" in raw:
        # A log has few different codes, many times each: taking those out by plain text is several times faster.
        for code in set(_ANSI.findall(raw, 0, 1 << 14)):
            if code.startswith(b"\x1b["):
                raw = raw.replace(code, b"")
        if b"\x1b" in raw:
            raw = _ANSI.sub(b"", raw)
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n")
    return raw


def _utf8(stream: BinaryIO) -> Iterator[bytes]:
    """The stream's blocks; UTF-16 with a byte-order mark (a redirect in PowerShell) is converted."""
    block = stream.read(BLOCK)
    encoding = _ENCODINGS.get(block[:2])
    if encoding is None:
        while block:
            yield block
            block = stream.read(BLOCK)
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    block = block[2:]
    while block:
        yield decoder.decode(block).encode("utf-8", "replace")
        block = stream.read(BLOCK)
    yield decoder.decode(b"", True).encode("utf-8", "replace")
