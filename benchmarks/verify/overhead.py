#!/usr/bin/env python3
"""What the proof costs: the whole `envforge verify` against the same load, chat and LoRA steps written by hand.

    python benchmarks/verify/overhead.py --python ENV/bin/python --model DIR [--rounds 3] [--steps 8] [--json FILE]

Both run in turn with the interpreter of the environment to be proven (torch, transformers, peft), from a cold start of
the process. The ratio is made of the best of each; processor time is told beside it, because another program on the
machine changes the time on the wall. `by_hand.py` checks nothing; the proof also loads the libraries, chats in 4 bits
where bitsandbytes is there, takes two steps of the Trainer with a checkpoint, merges, saves, reloads and chats again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def timed(command: list[str]) -> dict[str, Any]:
    """Seconds on the wall and of the processor of a command and all that it started; its stdout."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(wall, 2), "cpu": round(cpu, 2), "out": done.stdout}


def main() -> None:
    """Run both in turn, print the best of each, the ratios, and where the proof spends its time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    by_hand: list[dict[str, Any]] = []
    proof: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        receipt = Path(folder) / "receipt.json"
        hand = [options.python, str(HERE / "by_hand.py"), options.model, str(options.steps)]
        prove = [options.python, "-m", "envforge.verify", "--model", options.model, "--steps", str(options.steps)]
        for number in range(1, options.rounds + 1):
            by_hand.append(timed(hand))
            proof.append(timed([*prove, "--quiet", "--json", str(receipt)]))
            print(f"round {number}: by hand {shown(by_hand[-1])}, proof {shown(proof[-1])}", file=sys.stderr)
        answer = json.loads(by_hand[0].pop("out"))
        data = json.loads(receipt.read_text(encoding="utf-8"))
    pairs = list(zip(data["losses"], answer["losses"], strict=True))
    same = all(abs(one - two) < 1e-3 for one, two in pairs)
    best = {kind: (min(r[kind] for r in by_hand), min(r[kind] for r in proof)) for kind in ("wall", "cpu")}
    for kind, (one, two) in best.items():
        print(f"{kind:5} by hand {one:7.1f} s   proof {two:7.1f} s   ratio {two / one:.2f}")
    print(f"same losses in both: {'yes' if same else f'no: {pairs}'}")
    for layer in data["layers"]:
        slow = sorted(layer["checks"], key=lambda check: -check["cpu_seconds"])[:6]
        named = ", ".join(
            f"{c['id'].partition('.')[2]} {c['cpu_seconds']:.1f}" for c in slow if c["cpu_seconds"] >= 0.3
        )
        print(f"  {layer['layer']:12} {layer['seconds']:6.1f} s; of the processor: {named}")
    if options.json:
        rounds = {"by_hand": [plain(r) for r in by_hand], "proof": [plain(r) for r in proof]}
        ratios = {kind: round(two / one, 3) for kind, (one, two) in best.items()}
        options.json.write_text(
            json.dumps({"steps": options.steps, "same_losses": same, "ratio": ratios, **rounds}, indent=1) + "\n"
        )


def plain(row: dict[str, Any]) -> dict[str, float]:
    """The figures alone."""
    return {"wall": row["wall"], "cpu": row["cpu"]}


def shown(row: dict[str, Any]) -> str:
    """Both figures."""
    return f"{row['wall']:.1f} s ({row['cpu']:.1f} s of processor)"


if __name__ == "__main__":
    main()
