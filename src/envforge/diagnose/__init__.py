"""Logs to findings: what went wrong, how sure that is, who can cure it, and what to do.

The rules are data (matrix/data/diagnoses.yaml). The log is read once, in bounded memory; nothing here runs a command
or touches the network.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from envforge.diagnose.decide import decide
from envforge.diagnose.engine import run
from envforge.diagnose.facts import Facts
from envforge.diagnose.model import Finding, Report
from envforge.diagnose.rules import load_rules
from envforge.errors import UsageError
from envforge.resolver.hosts import Host

__all__ = ["Finding", "Report", "diagnose", "open_log"]


def diagnose(
    stream: BinaryIO, *, driver: str | None = None, host: Host | None = None, no_driver: bool = False
) -> Report:
    """Read a log to its end and say what is known about it.

    Args:
        stream: the log as bytes; any size, any encoding errors.
        driver: the host's driver version where it is known; it wins over what the log says.
        host: the host's facts (`detect --json`).
        no_driver: it is known that the host has no driver.

    Returns:
        The report; its findings are empty when nothing is known.
    """
    facts = Facts(driver=driver, driver_given=driver is not None or no_driver, host=host)
    if host is not None and not facts.driver_given:
        facts.driver, facts.driver_given = host.driver, True
    rules = load_rules()
    seen = run(stream, rules, facts)
    findings = decide(rules, seen, facts)
    told = tuple(dict.fromkeys(step for finding in findings for step in finding.next)) if findings else rules.next
    notes = (facts.note,) if facts.note else ()
    return Report(findings, _shown(facts), told, notes)


def _shown(facts: Facts) -> dict[str, str]:
    """The facts worth printing."""
    values = {name: best[1] for name, best in facts.seen.items()}
    shown = {
        "driver": "none" if facts.driver_none else facts.driver_version,
        "torch": values.get("torch"),
        "build": values.get("local"),
        "gpu": ", ".join(facts.every.get("gpu", [])[:3]) or None,
        "python": values.get("python"),
    }
    return {name: value for name, value in shown.items() if value}


def open_log(path: Path) -> BinaryIO:
    """Open a log file, plain or gzip.

    Raises:
        UsageError: missing, a folder, or not readable.
    """
    try:
        stream: BinaryIO = path.open("rb")
        head = stream.read(2)
        stream.seek(0)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file", "give a log file, or - for standard input") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error
    if head == b"\x1f\x8b":
        import gzip
        from typing import cast

        stream.close()
        return cast("BinaryIO", gzip.open(path, "rb"))
    return stream
