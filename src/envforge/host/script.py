"""The shell probe, for nodes where nothing can be installed."""

from __future__ import annotations

from pathlib import Path

from envforge.host.record import ENV_NAMES
from envforge.host.smi import QUERY


def probe_script() -> str:
    """POSIX sh text; run as `sh probe.sh DIR` it writes a record folder, as `sh probe.sh -` a tar of one to stdout."""
    text = Path(__file__).with_name("probe.sh").read_text(encoding="utf-8")
    # Written into the text so that both probes ask the same.
    return text.replace("@QUERY@", ",".join(QUERY)).replace("@ENV_NAMES@", "|".join(ENV_NAMES))
