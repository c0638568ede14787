"""The whole command against uv's, for the same request: wall time and peak memory, caches warm, runs taken in turns.

    python benchmarks/resolve/process.py [--repeat N] [--json FILE]

- `resolve --no-lock --json` against `uv pip compile` of the same line (Python 3.11).
- `resolve --lock` against `uv pip compile` of the pins that resolve gave, with the lock's format and hashes.

Each pair runs in turns, so that a machine that slows down slows both; what counts is the median of the ratios. uv reads
pip's own settings for the index, as envforge does. It looks for an interpreter of the wanted version first, which is
slow where many are installed and which envforge spares it; `ratio_told` is the ratio to uv that is told one. Exit 1 where a limit is missed: 0.3 (unsloth), 0.1 (XTuner line),
1.3 (lock), memory below uv's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envforge.lock import find_uv, index_arguments, python_platform, read_pip_settings
from envforge.lock.settings import uv_environment

UNSLOTH = "unsloth bitsandbytes transformers peft trl"
XTUNER = (
    "torch==2.1.2 torchvision==0.16.2 torchaudio==2.1.2 transformers==4.36.2 bitsandbytes==0.41.2.post2 "
    "deepspeed==0.12.3 xtuner"
)


@dataclass(frozen=True)
class Run:
    """One finished process: seconds, peak resident MiB."""

    seconds: float
    mib: float


def run(command: Sequence[str], folder: Path, env: dict[str, str]) -> Run:
    """Run to the end; a failure ends the benchmark with the command's own words."""
    with tempfile.TemporaryFile() as said:
        begun = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)[:120]}: exit {process.returncode}\n{said.read().decode()[-1500:]}")
    return Run(seconds, used.ru_maxrss / 1024)


def compare(name: str, ours: Sequence[str], theirs: Sequence[str], folder: Path, repeat: int) -> dict[str, object]:
    """Both in turns, `repeat` times after one of each to warm up."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    uv_env = uv_environment(read_pip_settings(os.environ))
    told = [*theirs, "--python", sys.executable]
    run(ours, folder, env), run(theirs, folder, uv_env)
    rounds = [(run(ours, folder, env), run(theirs, folder, uv_env), run(told, folder, uv_env)) for _ in range(repeat)]
    pairs = [(a, b) for a, b, _ in rounds]
    return {
        "name": name,
        "envforge_s": round(statistics.median(a.seconds for a, _ in pairs), 3),
        "uv_s": round(statistics.median(b.seconds for _, b in pairs), 3),
        "ratio": round(statistics.median(a.seconds / b.seconds for a, b in pairs), 3),
        "ratio_told": round(statistics.median(a.seconds / c.seconds for a, _, c in rounds), 3),
        "envforge_mib": round(max(a.mib for a, _ in pairs), 1),
        "uv_mib": round(max(b.mib for _, b in pairs), 1),
    }


def compile_command(requirements: Path, python: str, lock: bool) -> list[str]:
    """uv's own way to the same answer."""
    command = [find_uv(), "pip", "compile", str(requirements), "--python-version", python, "--python-platform"]
    command += [python_platform("x86_64", "2.35"), "--no-header", *index_arguments(read_pip_settings(os.environ))]
    if not lock:
        return command
    # What makes the same lock: the wheels' addresses and hashes, from the index's files alone.
    return [*command, "--generate-hashes", "--format", "pylock.toml"]


def main() -> int:
    """Measures, prints, judges."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    envforge = [str(Path(sys.executable).with_name("envforge")), "resolve"]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = ["--driver", "580.65.06", "--gpu", "sm_80", "--glibc", "2.35"]
        for label, line, python, limit in (("unsloth", UNSLOTH, "3.11", 0.3), ("xtuner", XTUNER, "3.10", 0.1)):
            file = folder / f"{label}.txt"
            file.write_text(line.replace(" ", "\n") + "\n")
            ours = [*envforge, *line.split(), *target, "--python", python, "--no-lock", "--json"]
            row = compare(label, ours, compile_command(file, python, lock=False), folder, options.repeat)
            rows.append({**row, "limit": limit})
        # torch's default build comes from an index like the rest: a wheel in a local folder would be hashed each time.
        ours = [*envforge, *UNSLOTH.split(), *target, "--python", "3.12", "--lock", "--json"]
        answer = json.loads(subprocess.run(ours, check=True, capture_output=True, text=True).stdout)
        pins = folder / "pins.txt"
        pins.write_text("".join(f"{name}=={version}\n" for name, version in answer["pins"].items()))
        ours = [*ours[:-1], "-o", str(folder / "locked.txt")]
        row = compare("lock", ours, compile_command(pins, "3.12", lock=True), folder, options.repeat)
        rows.append({**row, "limit": 1.3})
    missed = []
    for row in rows:
        print("{name}: envforge {envforge_s} s, uv {uv_s} s, ratio {ratio} (limit {limit}; {ratio_told} to uv told its interpreter); "
              "memory {envforge_mib} MiB, uv {uv_mib} MiB".format(**row))  # fmt: skip
        if float(str(row["ratio"])) > float(str(row["limit"])):
            missed.append(f"{row['name']}: ratio {row['ratio']} over {row['limit']}")
        if row["name"] != "lock" and float(str(row["envforge_mib"])) > float(str(row["uv_mib"])):
            missed.append(f"{row['name']}: more memory than uv")
    if options.json:
        options.json.write_text(json.dumps({"schema": 1, "runs": rows, "missed": missed}, indent=1) + "\n")
    print("\n".join(missed) or "every limit is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
