"""What schedulers, registries, hubs and networks print: each is found first, and jobs that went well stay clean."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from envforge.diagnose import Report, diagnose

CASES = Path(__file__).parents[1] / "cases" / "schedulers"
FOUND: list[dict[str, Any]] = yaml.safe_load((CASES / "findings.yaml").read_text())
CLEAN: list[str] = yaml.safe_load((CASES / "clean.yaml").read_text())
ASKED = {
    "host-oom-kill", "time-limit", "preempted", "node-fail", "image-pull", "quota", "hub-auth", "hub-unreachable",
    "tls-ca", "nccl-interface", "evicted", "cancelled", "preflight-refused", "scheduler-unreachable", "cluster-auth",
    "k8s-no-fitting-node", "k8s-volume", "k8s-config", "k8s-refused", "allocation-refused",
}  # fmt: skip


def read(log: str) -> Report:
    return diagnose(io.BytesIO(log.encode()))


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row['id']}-{n}") for n, row in enumerate(FOUND)])
def test_found_first(row: dict[str, Any]) -> None:
    findings = read(row["log"]).findings
    ids = [finding.id for finding in findings]
    assert ids and ids[0] == row["id"], ids
    if "confidence" in row:
        assert findings[0].confidence == row["confidence"]
    assert not set(ids) & set(row.get("not", []))
    assert findings[0].fixes and "{" not in findings[0].cause


@pytest.mark.parametrize(
    "dress",
    [
        pytest.param(lambda line: f"12: {line}", id="srun-l"),
        pytest.param(lambda line: f"[pod/train-0-x7k2p/job] 2026-11-02T10:00:00.123456789Z {line}", id="kubectl"),
        pytest.param(lambda line: f"2026-11-02T10:00:00.123456789Z stderr F {line}", id="cri"),
    ],
)
def test_prefixes_of_collectors_change_nothing(dress: Callable[[str], str]) -> None:
    wrong = []
    for number, row in enumerate(FOUND):
        log = "".join(f"{dress(line)}\n" for line in row["log"].splitlines())
        ids = [finding.id for finding in read(log).findings]
        if ids[:1] != [row["id"]]:
            wrong.append((number, row["id"], ids))
    assert not wrong


@pytest.mark.parametrize("number", range(len(CLEAN)))
def test_clean(number: int) -> None:
    assert [(f.id, f.evidence[0].text) for f in read(CLEAN[number]).findings if f.id in ASKED] == []


def test_a_kill_is_the_schedulers_only_when_it_says_so() -> None:
    """The same SIGKILL: without a word it is memory, after the scheduler's own message it is what follows from it."""
    kill = "  exitcode  : -9 (pid: 4121)\n  traceback : Signal 9 (SIGKILL) received by PID 4121\n"
    assert [f.id for f in read(kill).findings] == ["host-oom-kill"]
    ended = "slurmstepd: error: *** JOB 1 ON a CANCELLED AT 2026-11-02T03:00:12 DUE TO {} ***\n"
    for words, name in (("TIME LIMIT", "time-limit"), ("PREEMPTION", "preempted"), ("NODE FAILURE", "node-fail")):
        assert [f.id for f in read(ended.format(words) + kill).findings] == [name]


def test_oom_stands_before_the_time_limit_that_it_led_to() -> None:
    log = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
    log += "slurmstepd: error: *** JOB 7 ON a CANCELLED AT 2026-11-02T03:00:12 DUE TO TIME LIMIT ***\n"
    assert [f.id for f in read(log).findings] == ["host-oom-kill", "time-limit"]


def test_refused_node_follows_from_its_cause() -> None:
    log = "torch 2.9.1+cu128\nThe NVIDIA driver on your system is too old (found version 11040).\nexit code 86\n"
    findings = read(log).findings
    assert [f.id for f in findings] == ["driver-too-old", "preflight-refused"]
    assert findings[1].consequence_of == ("driver-too-old",)


def test_account_is_named() -> None:
    log = 'jobs.batch is forbidden: User "ada" cannot create resource "jobs" in API group "batch" in the namespace "ml"'
    (finding,) = read(log).findings
    assert "ada may not create jobs" in finding.cause
