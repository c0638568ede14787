#!/usr/bin/env python3
"""How fast `envforge diagnose` reads a large log, against a plain pass that only counts lines with one word in them.

    python benchmarks/diagnose/throughput.py [--megabytes 100] [--kind training|nccl|errors|progress]...

Each log is generated, then read three times by both in child processes; the best time and the peak memory count. The
plain pass is what `grep -c` does, in Python: read blocks of lines and look for one literal in each line.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("training", "nccl", "errors", "progress")


def lines(kind: str, seed: int = 7) -> Iterator[str]:
    """Endless lines of one kind of log."""
    rng = random.Random(seed)
    frame = (
        '  File "/srv/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1511, in _wrapped_call_impl\n'
    )
    step = 0
    while True:
        step += 1
        rank = step % 8
        loss = 2.0 / (1 + step / 1e5) + rng.random() / 50
        if kind == "training":
            epoch = step / 1e5
            yield f"{{'loss': {loss:.4f}, 'grad_norm': {rng.random():.4f}, 'lr': 2e-05, 'epoch': {epoch:.4f}}}\n"
            if step % 20 == 0:
                yield f"[rank{rank}]: step {step} memory allocated {40 + rng.random():.2f} GiB of 79.15 GiB\n"
        elif kind == "nccl":
            yield f"node{step % 4}:4012:4120 [{rank}] NCCL INFO Channel {step % 32:02d} : {rank}[{rank}] -> 1 via P2P\n"
        elif kind == "progress":
            yield f"\r\x1b[32m {step % 100}%\x1b[0m|####      | {step}/99999 [02:11<15:40,  1.09s/it, loss={loss:.3f}]"
            if step % 500 == 0:
                yield "\n"
        else:
            yield (
                f"[rank{rank}]: ../aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: "
                f"block: [{step % 512},0,0], thread: [1,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
            )
            yield f"[rank{rank}]: {frame}"


def write(path: Path, kind: str, megabytes: int) -> None:
    """Generate a log of about that size."""
    left = megabytes * 1_000_000
    with path.open("w", encoding="utf-8") as file:
        chunk: list[str] = []
        for line in lines(kind):
            chunk.append(line)
            left -= len(line)
            if len(chunk) == 10_000 or left <= 0:
                file.writelines(chunk)
                chunk.clear()
            if left <= 0:
                return


def child(mode: str, path: str) -> None:
    """One measured pass, in a process of its own."""
    if mode == "diagnose":
        from envforge.diagnose import diagnose

        diagnose_warm(diagnose)
        started, burnt = time.perf_counter(), time.process_time()
        with open(path, "rb") as stream:  # noqa: PTH123
            report = diagnose(stream)
        found = [finding.id for finding in report.findings]
    else:
        started, burnt = time.perf_counter(), time.process_time()
        count = 0
        with open(path, "rb") as stream:  # noqa: PTH123
            for line in stream:
                count += b"out of memory" in line
        found = [str(count)]
    seconds = time.perf_counter() - started
    cpu = time.process_time() - burnt
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_mib": peak, "found": found}))


def diagnose_warm(diagnose: object) -> None:
    """Rules and matrix are loaded before the clock starts: their cost does not grow with the log."""
    import io

    diagnose(io.BytesIO(b"nothing\n"))  # type: ignore[operator]


def measure(mode: str, path: Path, rounds: int) -> dict[str, Any]:
    """The best of some rounds."""
    results = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, __file__, "--child", mode, str(path)], capture_output=True, text=True, check=True
        )
        results.append(json.loads(done.stdout))
    return min(results, key=lambda row: row["seconds"])


def main() -> None:
    """Print one line for each kind and mode, as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    rows = []
    print(f"{'log':10} {'pass':9} {'MB/s':>8} {'seconds':>8} {'MB/cpu s':>9} {'peak MiB':>9}  found")
    for kind in options.kind or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "job.log"
            write(path, kind, options.megabytes)
            size = path.stat().st_size / 1e6
            for mode in ("diagnose", "plain"):
                best = measure(mode, path, options.rounds)
                speed, per_cpu = size / float(best["seconds"]), size / float(best["cpu"])
                rows.append({"kind": kind, "pass": mode, "megabytes": size, "mb_per_s": speed, **best})
                print(
                    f"{kind:10} {mode:9} {speed:8.1f} {best['seconds']:8.2f} {per_cpu:9.1f} "
                    f"{best['peak_mib']:9.1f}  {best['found']}"
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
