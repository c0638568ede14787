#!/usr/bin/env python3
"""Imports every package that a plan pins, each in a process of its own, in an environment that was built from it.

    tools/import_pins.py FOLDER          FOLDER: what `envforge build --engine venv --output FOLDER` made

Prints one line per pin: works, or the error; packages without a module of their own are named. Exit 1 when one fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from envforge.matrix.load import load_matrix
from envforge.project import read_plan

# Of an error only the last line that says something.
CODE = "import importlib, sys; importlib.import_module(sys.argv[1])"


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 2
    folder = Path(argv[0])
    plan = read_plan(folder)
    if plan is None:
        print(f"{folder} holds no plan.json", file=sys.stderr)
        return 2
    python = next(path for path in (folder / "bin/python", folder / "env/bin/python") if path.exists())
    modules = {row.name: row.import_name for row in load_matrix().packages.values()}
    failed = 0
    for name, version in sorted(plan.pins.items()):
        module = modules.get(name)
        if not module:
            print(f"{name:24} {version:16} has no module of its own")
            continue
        done = subprocess.run(
            [python, "-W", "ignore", "-c", CODE, module], capture_output=True, text=True, errors="replace", cwd=folder
        )
        said = [line for line in done.stderr.splitlines() if re.match(r"\w+(\.\w+)*(Error|Exception)\b", line)]
        problem = "" if done.returncode == 0 else (said[-1] if said else f"exit {done.returncode}")[:160]
        failed += bool(problem)
        print(f"{name:24} {version:16} {problem or 'works'}", flush=True)
    print(f"{len(plan.pins) - failed} of {len(plan.pins)} without an error")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
