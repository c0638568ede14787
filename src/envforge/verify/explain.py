"""From a receipt that failed to what `diagnose` reads: the text of everything that broke.

`envforge diagnose` is not installed in images. Where it can be imported (all of envforge is in the environment) it is
asked in a process of its own; elsewhere the command that started the proof does it with the receipt.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

SECONDS = 120.0  # for diagnose; it reads some kilobytes


def log_of(receipt: dict[str, Any]) -> str:
    """Logs and tracebacks of the layers that failed, the run with CUDA_LAUNCH_BLOCKING last; "" when none did."""
    parts: list[str] = []
    for layer in receipt.get("layers", ()):
        if layer.get("status") != "fail":
            continue
        runs = layer.get("runs", ())
        tails = [str(run.get("log_tail") or "") for run in runs]
        parts += tails
        for check in layer.get("checks", ()):
            if check.get("status") == "fail":
                error = str(check.get("error") or "")
                parts += [] if error in tails else [error]
                parts.append(str(check.get("text") or ""))
        if len(runs) > 1:
            parts.append(str(runs[1].get("error") or ""))
    versions = receipt.get("versions") or {}
    if parts and versions.get("torch"):
        parts.insert(0, f"torch {versions['torch']}")
    return "\n".join(part.rstrip("\n") for part in parts if part.strip()) + ("\n" if parts else "")


def findings_here(receipt: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What diagnose says, most likely first; None when it is not here or gave no answer."""
    text = log_of(receipt)
    if not text:
        return []
    try:
        if importlib.util.find_spec("envforge.diagnose") is None or importlib.util.find_spec("envforge.cli") is None:
            return None
    except (ImportError, ValueError):
        return None
    command = [sys.executable, "-m", "envforge", "diagnose", "-", "--json"]
    driver = (receipt.get("host") or {}).get("driver")
    try:
        done = subprocess.run(
            [*command, *(["--driver", driver] if driver else [])],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
        return None
    return found
