"""Reading logs: line numbers, prefixes, progress bars, colours, broken bytes, endless lines, bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envforge.diagnose import diagnose, open_log
from envforge.diagnose import scan as scanner
from envforge.diagnose.literals import required_literal
from envforge.diagnose.prefix import strip
from envforge.errors import UsageError

OOM = "RuntimeError: Triton Error [CUDA]: device kernel image is invalid"


def ids(log: bytes) -> list[str]:
    return [finding.id for finding in diagnose(io.BytesIO(log)).findings]


def scanned(log: bytes, *literals: str) -> list[tuple[int, str]]:
    lines = scanner.scan(io.BytesIO(log), [literal.encode() for literal in literals])
    return [(line.number, line.text) for line in lines]


@pytest.mark.parametrize("block", [7, 64, 1 << 19])
def test_line_numbers_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(scanner, "BLOCK", block)
    monkeypatch.setattr(scanner, "LOOK_AROUND", 40)
    log = b"".join(b"line %d %s\n" % (n, b"needle" if n % 97 == 0 else b"hay") for n in range(1, 2000))
    found = scanned(log, "needle")
    assert [number for number, _ in found] == list(range(97, 2000, 97))
    assert all(text == f"line {number} needle" for number, text in found)


def test_context_reaches_over_block_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "BLOCK", 32)
    monkeypatch.setattr(scanner, "LOOK_AROUND", 200)
    log = b"".join(b"row %d\n" % n for n in range(50)) + b"needle\n" + b"".join(b"tail %d\n" % n for n in range(50))
    windows = [line.around(3, 2) for line in scanner.scan(io.BytesIO(log), [b"needle"])]
    assert windows == ["row 47\nrow 48\nrow 49\nneedle\ntail 0\ntail 1"]


def test_carriage_returns_are_no_lines_but_are_read() -> None:
    log = (
        b"start\n" + b"".join(b"\r %d%%|##  | step %d" % (n, n) for n in range(500)) + b"\r" + OOM.encode() + b"\nend\n"
    )
    finding = diagnose(io.BytesIO(log)).findings[0]
    assert finding.id == "triton-driver-or-ptxas-mismatch"
    assert finding.evidence[0].line == 2
    assert finding.evidence[0].text == OOM


def test_windows_line_ends_count_once() -> None:
    assert scanned(b"a\r\nb\r\nneedle\r\n", "needle") == [(3, "needle")]


@pytest.mark.parametrize(
    "dressed",
    [
        "\x1b[31mRuntimeError\x1b[0m: Triton Error [CUDA]: device kernel \x1b[1mimage is invalid\x1b[0m",
        "[rank3]: " + OOM,
        "12: " + OOM,
        "2026-11-03T04:11:09.123456789Z stderr F " + OOM,
        "[pod/train-0/trainer] " + OOM,
        "trainer-1  | " + OOM,
        "#14 188.4 " + OOM,
        '{"log":"' + OOM + '\\n","stream":"stderr","time":"2026-11-03T04:11:09Z"}',
        "Nov  3 04:11:09 node7 trainer: " + OOM,
    ],
)
def test_dressed_lines(dressed: str) -> None:
    assert ids(dressed.encode()) == ["triton-driver-or-ptxas-mismatch"]


def test_rank_is_told() -> None:
    finding = diagnose(io.BytesIO(f"[rank3]: {OOM}\n[rank5]: {OOM}\n".encode())).findings[0]
    assert [hit.rank for hit in finding.evidence] == ["3", "5"]


def test_prefixes() -> None:
    assert strip("[rank3]: boom") == ("boom", "3")
    assert strip("[default7]:boom") == ("boom", "7")
    assert strip("3: boom") == ("boom", "3")
    assert strip("2026-11-03 04:11:09,123 [rank1]: boom") == ("boom", "1")
    assert strip("boom 3: x") == ("boom 3: x", None)


def test_broken_utf8_nul_and_utf16() -> None:
    assert ids(b"\xff\xfe\x00" + b"\x80\x81 " + OOM.encode() + b"\xc3\n") in (["triton-driver-or-ptxas-mismatch"], [])
    assert ids(b"\x80\x81 " + OOM.encode() + b" \xc3\x28\n") == ["triton-driver-or-ptxas-mismatch"]
    assert ids(b"\x00\x00" + OOM.encode() + b"\x00\n") == ["triton-driver-or-ptxas-mismatch"]
    assert ids(f"\ufeff{OOM}\n".encode("utf-16-le")) == ["triton-driver-or-ptxas-mismatch"]
    assert ids(f"\ufeff{OOM}\n".encode("utf-16-be")) == ["triton-driver-or-ptxas-mismatch"]


@pytest.mark.parametrize("at", [0, 5_000, 1_048_500, 1_500_000, 2_999_900])
def test_endless_line(at: int) -> None:
    """A literal is found anywhere in a line of megabytes, also where the line had to be cut."""
    log = b"x" * at + OOM.encode() + b"y" * (3_000_000 - at)
    finding = diagnose(io.BytesIO(log)).findings[0]
    assert finding.id == "triton-driver-or-ptxas-mismatch"
    assert finding.evidence[0].line == 1
    assert len(finding.evidence[0].text) < 400


def test_evidence_keeps_first_and_last() -> None:
    noise = "".join(f"step {n}\n{OOM} #{n}\n" for n in range(3000))
    finding = diagnose(io.BytesIO(noise.encode())).findings[0]
    assert finding.evidence[0].line == 2
    assert finding.evidence[-1].line > 5000
    assert len(finding.evidence) <= 6
    assert finding.count >= 100


def test_gzip_and_missing(tmp_path: Path) -> None:
    packed = tmp_path / "job.log.gz"
    packed.write_bytes(gzip.compress(OOM.encode()))
    with open_log(packed) as stream:
        assert diagnose(stream).findings
    with pytest.raises(UsageError, match="no such file"):
        open_log(tmp_path / "none.log")
    with pytest.raises(UsageError, match="cannot be read"):
        open_log(tmp_path)


WORDS = st.sampled_from(
    [
        b"CUDA out of memory. Tried to allocate ",
        b"9999999999999999999 GiB",
        b" nan",
        b"loss': ",
        b"\r",
        b"\x1b[",
        b"lspci",
        b"\n",
        b"Assertion `",
        b"No module named '",
        b"cannot import name '",
        b"(from versions: ",
        b"Killed",
        b"\xff",
        b"torch 2.",
        b"which is of cuda capability 12.1",
        b"(8.0) - (12.0)",
        b'{"log":"\\',
        b"memory_allocated 1e9 GiB",
        b"grad_norm': 0.0,",
        b"found version 99999",
        b"GPU 0: NVIDIA ",
        b"Could not find a version that satisfies the requirement unsloth_zoo>=2026.1.1 ",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(WORDS, st.binary(max_size=40)), max_size=30))
def test_arbitrary_bytes_never_crash(parts: list[bytes]) -> None:
    report = diagnose(io.BytesIO(b"".join(parts)))
    json.dumps(report.to_json())


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_literal_is_in_every_match_of_an_escaped_text(text: str) -> None:
    import re

    literal = required_literal(re.escape(text))
    assert literal is None or literal in text.lower()


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        (r"too old \(found version (?P<v>\d+)\)", "too old (found version "),
        (r"(?:a|b)", None),
        (r"first|second", None),
        (r"colou?r of \w+ things", " things"),
        (r"[Aa]bcd[xyz]efghij", "efghij"),
        (r"abcde{2,3}fgh", "abcd"),
        (r"out_of_\d+_memory", "out_of_"),
        (r"\bKilled\b", "killed"),
    ],
)
def test_required_literal(pattern: str, literal: str | None) -> None:
    assert required_literal(pattern) == literal


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """60 MB of log, of which much looks like trouble, is read in a child whose peak memory is looked at."""
    log = tmp_path / "big.log"
    with log.open("w", encoding="utf-8") as file:
        for n in range(150_000):
            file.write(f"{{'loss': 1.{n:06d}, 'grad_norm': 0.5}} memory allocated {n % 7}.5 GiB, step {n} of 150000\n")
            file.write(f"\r\x1b[32m{n}/150000\x1b[0m [01:02<03:04, 1.0it/s] {'#' * 120}")
            file.write(f"[rank{n % 8}]: Indexing.cu: indexSelectLargeIndex: [{n}] Assertion `srcIndex < x` failed.\n")
            if n % 5_000 == 0:
                file.write("z" * 400_000 + "\n")
    assert log.stat().st_size > 50_000_000
    program = textwrap.dedent(
        """
        import pathlib, re, sys
        from envforge.diagnose import diagnose
        with open(sys.argv[1], "rb") as stream:
            report = diagnose(stream)
        # Not ru_maxrss: across fork and exec it keeps the peak of whoever started this process.
        peak = re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())
        print([f.id for f in report.findings], int(peak[1]) // 1024)
        """
    )
    done = subprocess.run([sys.executable, "-c", program, str(log)], capture_output=True, text=True, check=True)
    found, _, peak = done.stdout.strip().rpartition(" ")
    assert "device-assert" in found
    assert int(peak) < 100, f"{peak} MiB"
