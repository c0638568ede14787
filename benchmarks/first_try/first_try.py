#!/usr/bin/env python3
"""How often the first try works: requests with one pin and the rest open, for torch 2.13.0 on the CPU.

    first_try.py                       what results.json lacks of requests.txt, on both sides
    first_try.py --only 'peft==0.5'    lines that hold this text
    first_try.py --again [--side ours] do them anew; --side says which side (ours, uv)
    first_try.py --request 'peft==0.6.2 transformers trl'   one more line, shown and not kept

ours: `envforge resolve --driver none --python 3.11 --lock`, the lock installed into a fresh environment.
uv:   `uv pip install` of the same lines into a fresh environment, undated.
Then in both every requested package is imported and a tiny random Llama is trained for two LoRA steps: SFTTrainer where
trl is asked for, else Trainer. proven: all of that worked. refused: no environment, for a reason that names the pin.
failed: everything else. One request at a time; results.json is written after each, results.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tools"))

from fresh_env import TORCH, child, end_cleanly, fresh, here  # noqa: E402

from envforge.files import write_atomic  # noqa: E402
from envforge.lock import install_command, read_pip_settings  # noqa: E402

REQUESTS, STATE, TABLE = HERE / "requests.txt", HERE / "results.json", HERE / "results.md"
PYTHON = "3.11"
MEMBERS = {"trl": "trl:SFTTrainer", "peft": "peft:LoraConfig", "transformers": "transformers:Trainer"}
SHOWN = ("transformers", "peft", "trl", "accelerate", "datasets", "numpy", "bitsandbytes", "pyarrow", "huggingface-hub")


def main(argv: list[str] | None = None) -> int:
    """Runs what is missing; -> 1 when one of ours failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="lines that hold this text")
    parser.add_argument("--again", action="store_true", help="also what is recorded")
    parser.add_argument("--side", choices=("ours", "uv"), action="append", help="one side only")
    parser.add_argument("--request", action="append", help="another line; shown, not kept")
    options = parser.parse_args(argv)
    os.nice(10)
    end_cleanly()
    sides = options.side or ["ours", "uv"]
    if options.request:
        bad = 0
        for line in options.request:
            for side in sides:
                row = run(side, line.split())
                bad |= side == "ours" and row["status"] == "failed"
                print(json.dumps({"request": line, "side": side, **row}, indent=1), flush=True)
        return int(bad)
    lines = [line.strip() for line in REQUESTS.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    rows: dict[str, Any] = json.loads(STATE.read_text(encoding="utf-8")) if STATE.exists() else {}
    for line in lines:
        for side in sides:
            if options.only not in line or (side in rows.get(line, {}) and not options.again):
                continue
            row = run(side, line.split())
            rows.setdefault(line, {})[side] = row
            print(f"{side:4} {row['status']:8} {line}  {row['text']}", flush=True)
            rows = {known: rows[known] for known in lines if known in rows}
            write_atomic(STATE, json.dumps(rows, indent=1) + "\n")
            write_atomic(TABLE, table(rows))
    write_atomic(TABLE, table(rows))
    print(summary(rows))
    return int(any(row.get("ours", {}).get("status") == "failed" for row in rows.values()))


def run(side: str, words: list[str]) -> dict[str, Any]:
    """One request on one side."""
    names = [re.split(r"[=<>!~\[]", word)[0] for word in words]
    modules = [MEMBERS.get(name, name.replace("-", "_")) for name in ("torch", *names)]
    step = "sft" if "trl" in names else "trainer"
    row: dict[str, Any] = {"status": "failed", "text": "", "date": datetime.now(timezone.utc).strftime("%Y-%m-%d")}
    with fresh(PYTHON) as env:
        stage, text = (ours if side == "ours" else alone)(env, words)
        if stage == "refused":
            row |= {"status": "refused" if names_pin(words, text) else "failed", "text": text}
        elif stage:
            row["text"] = f"{stage}: {text}"
        else:
            checked = env.check(step, modules)
            row["status"] = "proven" if checked.ok else "failed"
            row["text"] = checked.error
            row["versions"] = {name: checked.versions[name] for name in SHOWN if name in checked.versions}
    return row


def ours(env: Any, words: list[str]) -> tuple[str, str]:
    """-> stage that ended it ("" = installed) and its words."""
    lock = env.folder / "lock"
    lock.mkdir()
    command = [str(Path(sys.executable).with_name("envforge")), "resolve", "torch==2.13.0", *words]
    command += ["--driver", "none", "--python", PYTHON, "--lock", "-o", str(lock / "requirements.txt")]
    ran = child(command, env=dict(os.environ), cwd=env.folder, timeout=600)
    if ran.code == 1:
        return "refused", " ".join(ran.words.split())
    if not ran.ok:
        return "resolve", " ".join(ran.words.split())[:400]
    argv, environment = install_command(lock, read_pip_settings(), python=env.python)
    done = child(argv, env=environment | {"UV_LINK_MODE": "hardlink"}, cwd=lock, timeout=600)
    return ("", "") if done.ok else ("install", " ".join(done.words.split())[:400])


def alone(env: Any, words: list[str]) -> tuple[str, str]:
    """The same lines for uv, with nothing of ours but the build of torch, so that no CUDA build is fetched."""
    ran = env.install([TORCH, *words], timeout=300)
    if ran.ok:
        return "", ""
    text = " ".join(ran.words.split())[:400]
    return ("refused" if "No solution found" in text else "install"), text


def names_pin(words: list[str], text: str) -> bool:
    """Whether a refusal names every pinned package with its version."""
    pins = [word.split("==") for word in words if "==" in word]
    return all(
        re.search(rf"{re.escape(name)}\s*(?:==)?\s*{re.escape(version)}(?!\d|\.\d)", text) for name, version in pins
    )


def summary(rows: dict[str, Any]) -> str:
    """The counts in a line per side."""
    out = []
    for side, words in (("ours", "envforge"), ("uv", "uv alone")):
        done = [row[side]["status"] for row in rows.values() if side in row]
        counts = ", ".join(f"{done.count(status)} {status}" for status in ("proven", "refused", "failed"))
        out.append(f"{words}: {counts} of {len(done)}")
    return "\n".join(out)


def table(rows: dict[str, Any]) -> str:
    """results.md."""
    dates = sorted({row[side]["date"] for row in rows.values() for side in row})
    span = dates[0] if len(set(dates)) == 1 else f"{dates[0]} to {dates[-1]}"
    out = [
        "# First try",
        "",
        f"{here(PYTHON)}; run {span}. Written by first_try.py; how it is measured stands there.",
        "",
    ]
    out += [f"- {line}" for line in summary(rows).splitlines()]
    out += ["", "| request (with torch==2.13.0) | envforge | uv alone |", "|---|---|---|"]
    out += [f"| {line} | {cell(row.get('ours'))} | {cell(row.get('uv'))} |" for line, row in rows.items()]
    out += ["", "## What was chosen", "", "| request | envforge | uv alone |", "|---|---|---|"]
    for line, row in rows.items():
        chosen = [", ".join(f"{n} {v}" for n, v in row.get(s, {}).get("versions", {}).items()) for s in ("ours", "uv")]
        out.append(f"| {line} | {chosen[0] or '-'} | {chosen[1] or '-'} |")
    return "\n".join(out) + "\n"


def cell(row: dict[str, Any] | None) -> str:
    """One result, with its words where it did not work."""
    if row is None:
        return "not run"
    text = str(row["text"]).replace("|", "/")
    return f"{row['status']}: {text[:300]}" if text else str(row["status"])


if __name__ == "__main__":
    sys.exit(main())
