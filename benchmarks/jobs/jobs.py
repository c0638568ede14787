"""What jobs cost: rendering them, and the preflight's share of a real job on a real Slurm.

    python benchmarks/jobs/jobs.py [--repeat N] [--python TORCH-PYTHON] [--json FILE] [--no-slurm]

- Render: 1,000 jobs for a node each, and one job of 1,000 nodes, for every tool; seconds, the median.
- Preflight: a job of two nodes on a private Slurm of this machine trains a LoRA on a tiny model for eight steps (gloo,
  CPU), the shortest job that trains at all. The batch script tells the time before and after its preflight, and at its
  start and end. The share is that of medians. `--python` names an environment with torch, transformers and peft.
- Look: the preflight's own process, started and ended, against an interpreter that does nothing.

Exit 1 where a limit is missed: render 2 s, share 2 %.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_RENDER, LIMIT_SHARE = 2.0, 0.02


def render_times(repeat: int) -> dict[str, dict[str, float]]:
    """Seconds for 1,000 jobs and for one of 1,000 nodes, by tool."""
    from envforge.jobs.model import JobSpec
    from envforge.jobs.slurm import TOOLS, render

    base = JobSpec("bench", "registry.example/a/b:c", ("torchrun", "train.py"), gpus_per_node=8, output="/shared/bench",
                   env={"A": "b"}, image_file=None)  # fmt: skip
    found = {}
    for tool in TOOLS:
        spec = replace(base, image_file="/shared/image") if tool in ("oci", "none") else base
        many = [replace(spec, name=f"bench-{i}", nodelist=f"node{i}") for i in range(1000)]
        runs, wide = [], []
        for _ in range(repeat):
            start = time.perf_counter()
            for one in many:
                render(one, tool, {})
            runs.append(time.perf_counter() - start)
            start = time.perf_counter()
            render(replace(spec, nodes=1000), tool, {})
            wide.append(time.perf_counter() - start)
        found[tool] = {"thousand jobs": statistics.median(runs), "thousand nodes": statistics.median(wide)}
    return found


def look_times(repeat: int) -> dict[str, float]:
    """Milliseconds of the preflight's process and of an empty interpreter."""
    program = ROOT / "templates" / "image" / "preflight.py"
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder) / "facts.json"
        facts.write_text('{"variant": "cpu"}')
        commands = {"preflight": [str(program), f"--facts={facts}", "--json"], "empty": ["-c", "pass"]}
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeat * 5):
            for name, words in commands.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, "-IS", *words], check=True, capture_output=True)
                times[name].append((time.perf_counter() - start) * 1000)
    return {name: statistics.median(rows) for name, rows in times.items()}


def job_times(repeat: int, python: str) -> list[dict[str, float]]:
    """Seconds of the whole batch script and of its preflight, for each run."""
    sys.path.insert(0, str(ROOT / "tests" / "engine"))
    from environment_folder import make_environment, packages
    from slurm_cluster import private_slurm
    from test_slurm_images import LORA

    from envforge.jobs.model import JobSpec
    from envforge.jobs.slurm import render

    rows = []
    with private_slurm() as slurm, tempfile.TemporaryDirectory(prefix="envforge-bench-") as place:
        image = make_environment(Path(place) / "image", these=packages(python))
        script = Path(place) / "train.py"
        script.write_text(LORA)
        for number in range(repeat):
            output = Path(place) / f"out{number}"
            output.mkdir()
            spec = JobSpec(f"bench-{number}", command=("torchrun", str(script)), nodes=2, output=str(output),
                           image_file=str(image), env={"OMP_NUM_THREADS": "1"})  # fmt: skip
            clock = 'echo "CLOCK $EPOCHREALTIME"'
            text = render(spec, "none")
            text = text.replace("set -u\n", f"set -u\n{clock}\n", 1).replace(
                "\nrun preflight", f"\n{clock}\nrun preflight", 1
            )
            text = text.replace("export ENVFORGE_PREFLIGHT=done\n", f"{clock}\nexport ENVFORGE_PREFLIGHT=done\n", 1)
            text = (
                text.replace('exit "$code"\n', f'{clock}\nexit "$code"\n') if text.endswith('exit "$code"\n') else text
            )
            (output / "job.sh").write_text(text)
            job = slurm("sbatch", "--parsable", str(output / "job.sh")).strip()
            if slurm.wait(job) != "COMPLETED":
                raise SystemExit((output / f"{job}.log").read_text())
            clocks = [float(word) for word in re.findall(r"CLOCK ([\d.]+)", (output / f"{job}.log").read_text())]
            rows.append({"job": clocks[-1] - clocks[0], "preflight": clocks[2] - clocks[1]})
    return rows


def main() -> int:
    """Measure and print; 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-slurm", action="store_true")
    options = parser.parse_args()
    answer: dict[str, Any] = {"render": render_times(options.repeat), "look_ms": look_times(options.repeat)}
    slowest = max(max(row.values()) for row in answer["render"].values())
    print(f"render: at most {slowest:.2f} s for 1,000 jobs or 1,000 nodes (limit {LIMIT_RENDER:.0f} s)")
    print(f"look: {answer['look_ms']['preflight']:.1f} ms, an empty interpreter {answer['look_ms']['empty']:.1f} ms")
    missed = slowest > LIMIT_RENDER
    if not options.no_slurm:
        rows = answer["jobs"] = job_times(options.repeat, options.python)
        job, look = (statistics.median(row[name] for row in rows) for name in ("job", "preflight"))
        answer["share"] = look / job
        print(f"preflight: {look:.2f} s of {job:.1f} s, {look / job:.1%} (limit {LIMIT_SHARE:.0%})")
        missed = missed or look / job > LIMIT_SHARE
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
