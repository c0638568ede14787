"""Runs the layers in processes of their own and turns every end of such a process into a finding.

Layers share one process as long as nothing fails: importing the stack and loading the model cost more than most checks.
A crash, an out-of-memory kill or a hang of it is recorded like any other failure. A layer that failed runs once more,
alone, in a fresh process with CUDA_LAUNCH_BLOCKING=1, so that a CUDA error is reported by the operator that caused it;
both errors are kept. What is still to be run after a failure gets a fresh process too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from envforge.verify.process import Run, run_stages
from envforge.verify.record import FAIL, SKIP, WARN, Check, progress
from envforge.verify.settings import Settings


@dataclass
class Layer:
    """The answer of one layer: its checks (of the first run), and every run of it."""

    name: str
    status: str
    checks: list[Check]
    runs: list[Run] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the receipt."""
        return {
            "layer": self.name,
            "status": self.status,
            "seconds": round(sum(run.seconds for run in self.runs), 2),
            "checks": [asdict(check) for check in self.checks],
            "runs": [run.to_json() for run in self.runs],
        }


def skipped(name: str, why: str) -> Layer:
    """A layer that was not run."""
    return Layer(name, SKIP, [Check(id=f"{name}.all", layer=name, status=SKIP, text=why)])


def run_layers(names: list[str], settings: Settings, keep_going: bool = False) -> list[Layer]:
    """One after the other; after a failure the rest is left out unless told otherwise."""
    layers: list[Layer] = []
    failed = ""
    while len(layers) < len(names):
        left = names[len(layers) :]
        if failed and not keep_going:
            layers += [skipped(name, f"not run: the {failed} layer failed") for name in left]
            break
        for run in run_stages(left, replace(settings, launch_blocking=False), announce=True):
            layer = finish(run, settings)
            layers.append(layer)
            if layer.status == FAIL:
                failed = failed or layer.name
    return layers


def run_layer(name: str, settings: Settings) -> Layer:
    """One layer alone."""
    return run_layers([name], settings)[0]


def finish(first: Run, settings: Settings) -> Layer:
    """The layer of a run; runs it again where that can tell more."""
    runs, checks = [first], list(first.checks)
    if first.failed and why_again(first, settings):
        progress(f"{first.layer}: failed, running once more in a fresh process with CUDA_LAUNCH_BLOCKING=1")
        second = run_stages([first.layer], replace(settings, launch_blocking=True))[0]
        runs.append(second)
        checks.append(compare(first, second, settings))
    return Layer(first.layer, status_of(checks), checks, runs, dict(first.notes))


def why_again(first: Run, settings: Settings) -> bool:
    """On a GPU every failure is run again; elsewhere only one where something broke, and a hang costs too much."""
    if settings.device == "cuda":
        return True
    return first.raised and first.outcome != "hang"


def compare(first: Run, second: Run, settings: Settings) -> Check:
    """What the second run adds, as a check of its own; it never turns a failure into a pass."""
    name = first.layer
    check = Check(id=f"{name}.rerun", layer=name, status=WARN, seconds=second.seconds)
    one, two = summary_of(first), summary_of(second)
    check.figure(first=one, second=two, cuda_launch_blocking=settings.device == "cuda")
    if settings.device != "cuda":
        check.figure(note="without a GPU the variable changes nothing: this shows only whether the failure repeats")
    if not second.failed:
        check.text = "passed when run again: the failure does not repeat, so look at memory, time and other processes"
    elif one == two:
        check.text = f"failed again in the same way: {two}"
    else:
        check.text = f"failed again, and this error is the closer one: {two}"
    return check


def summary_of(run: Run) -> str:
    """One sentence on how a run ended."""
    if run.outcome != "done":
        return run.error
    for check in run.checks:
        if check.status == FAIL:
            return f"{check.id}: {check.text}"
    return "passed"


def status_of(checks: list[Check]) -> str:
    """fail before warn before pass; skip only when nothing was checked."""
    states = [check.status for check in checks]
    if FAIL in states:
        return FAIL
    if states and all(state == SKIP for state in states):
        return SKIP
    return WARN if WARN in states else "pass"
