"""Receipts of finished jobs in one table, and a whole job diagnosed. Small scripts stand in for Slurm's programs."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import envforge.spec
from envforge.jobs.model import JobSpec
from envforge.jobs.record import Record, new_record, submitted, write_record

SCHEMA = json.loads((Path(envforge.spec.__file__).parent / "schemas" / "job.json").read_text())
DIGEST = "sha256:" + "ab" * 32
RECEIPTS = Path(__file__).parent.parent / "cases" / "receipts"
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId={}.0. Some of the step tasks have been OOM Killed.\n"


class Site:
    """A folder of jobs, and a Slurm that answers for them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        self.states: dict[str, str] = {}
        self._programs()

    def _programs(self) -> None:
        rows = "\n".join(
            f'    {number}) echo "JobId={number} JobName=x UserId=lovelace(1000) JobState={word} Reason=None '
            f'ExitCode={"0:0" if word == "COMPLETED" else "1:0"} NodeList=gpu-{number} Restarts=0" ;;'
            for number, word in self.states.items()
        )
        scontrol = f"#!/bin/sh\nfor word do case $word in\n{rows}\n    *) ;;\nesac; done\n"
        for name, text in (("scontrol", scontrol), ("sacct", "#!/bin/sh\nexit 1\n"), ("squeue", "#!/bin/sh\n")):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def job(self, number: str, word: str, log: str = "", **fields: Any) -> Path:
        folder = self.root / "jobs" / f"job-{number}"
        spec = JobSpec(f"job-{number}", image=f"registry.example/train@{DIGEST}", command=("python",),
                       output=str(folder), **fields)  # fmt: skip
        write_record(submitted(new_record(spec, "slurm", script="job.sh"), number))
        (folder / "job.sh").write_text("#!/bin/bash\n")
        (folder / f"{number}.log").write_text(log or "all well\n")
        self.states[number] = word
        self._programs()
        return folder

    def run(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        program = "from envforge.cli import main; import sys; main(sys.argv[1:])"
        env = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "NO_COLOR": "1"}
        return subprocess.run(
            [sys.executable, "-c", program, *words], cwd=self.root, env=env, input=stdin, capture_output=True, text=True
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def receipt(folder: Path, node: str, passed: bool = True, **more: Any) -> None:
    first = None if passed else {"layer": "training", "check": "training.loss", "text": "the loss does not fall"}
    data = {"schema": 1, "kind": "receipt", "grade": "full", "passed": passed, "seconds": 61.5, "first_failure": first,
            "image_digest": DIGEST, **more}  # fmt: skip
    (folder / f"receipt-{node}.json").write_text(json.dumps(data))


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, SCHEMA)
    found: list[dict[str, Any]] = answer["rows"]
    return found


def test_failed_nodes_first_with_their_finding(site: Site) -> None:
    good = site.job("11", "COMPLETED", verify=True, nodes=2)
    receipt(good, "gpu-1")
    receipt(good, "gpu-2", passed=False)
    site.job("12", "FAILED", OOM.format(12))
    refused = site.job("13", "FAILED", "preflight gpu-9: refused: no GPU is here. fix: ask for GPUs\n")
    cause = {"id": "no-gpu", "text": "no GPU is here", "fix": "ask for GPUs"}
    (refused / "preflight-13-gpu-9.json").write_text(json.dumps({"ok": False, "node": "gpu-9", "cause": cause}))
    site.job("14", "RUNNING")
    done = site.run("job", "collect", "jobs", "--json", "--check")
    assert done.returncode == 1, done.stderr
    found = rows(done)
    assert [(row["result"], row["job"], row["node"]) for row in found] == [
        ("failed", "job-11", "gpu-2"), ("failed", "job-12", "gpu-12"), ("failed", "job-13", "gpu-9"),
        ("open", "job-14", "gpu-14"), ("passed", "job-11", "gpu-1"),
    ]  # fmt: skip
    assert found[0]["detail"] == "training, training.loss: the loss does not fall"
    assert found[1]["finding"] == "host-oom-kill" and found[1]["exit_code"] == 1
    assert found[2]["finding"] == "preflight-refused" and "no GPU is here" in found[2]["detail"]
    assert found[4]["digest"] == DIGEST and found[4]["grade"] == "full" and found[4]["finding"] == ""
    assert site.run("job", "collect", "jobs", "--json").returncode == 0


def recorded(folder: Path, name: str, node: str) -> None:
    """A receipt that a real proof left: without torch, or with a cache folder that cannot be written."""
    (folder / f"receipt-{node}.json").write_text((RECEIPTS / f"{name}.json").read_text())


def test_what_failed_is_told_from_the_receipt_that_the_job_left(site: Site) -> None:
    folder = site.job("15", "FAILED", "the tasks ended\n", verify=True, nodes=3)
    recorded(folder, "no-torch", "gpu-1")
    recorded(folder, "caches", "gpu-2")
    receipt(folder, "gpu-3")
    found = {row["node"]: row["finding"] for row in rows(site.run("job", "collect", "jobs", "--json"))}
    assert found == {"gpu-1": "python-package-missing", "gpu-2": "cache-not-writable", "gpu-3": ""}

    done = site.run("job", "status", str(folder), "--json")
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, SCHEMA)
    assert done.returncode == 1
    told = {row["node"]: (row["finding"] or {}).get("id", "") for row in answer["receipts"]}
    assert told == found
    shown = site.run("job", "status", str(folder)).stdout
    assert "proof failed (static) on gpu-1" in shown and "python-package-missing: A module is not installed" in shown
    assert "not writable by uid 0: HF_HOME /proc/nowhere" in shown and "why: envforge diagnose" not in shown

    done = site.run("job", "logs", str(folder))
    assert done.stdout == "the tasks ended\n", "what the job said is all of the output"
    assert "the proof failed on gpu-1" in done.stderr and "python-package-missing" in done.stderr

    report = json.loads(site.run("diagnose", "--job", str(folder), "--json").stdout)
    first, second = report["findings"][:2]
    assert (first["id"], first["confidence"]) == ("cache-not-writable", "certain"), "measured by the proof itself"
    assert first["evidence"][0]["file"] == "receipt-gpu-2.json"
    assert second["id"] == "python-package-missing" and second["evidence"][0]["file"] == "receipt-gpu-1.json"


def test_a_job_without_a_receipt_says_where_to_ask(site: Site) -> None:
    folder = site.job("16", "FAILED", OOM.format(16))
    assert f"why: envforge diagnose --job {folder}" in site.run("job", "status", str(folder)).stdout
    (folder / "receipt-gpu-1.json").write_text(json.dumps({"passed": False, "layers": [7], "host": "no"}))
    (row,) = rows(site.run("job", "collect", "jobs", "--json"))
    assert (row["result"], row["finding"]) == ("failed", "host-oom-kill"), "no receipt of ours: the logs tell"


def test_receipt_of_another_image_does_not_count(site: Site) -> None:
    folder = site.job("21", "COMPLETED", verify=True)
    receipt(folder, "gpu-1", image_digest="sha256:" + "cd" * 32)
    (row,) = rows(site.run("job", "collect", str(folder), "--json"))
    assert row["result"] == "failed" and "another image" in row["detail"] and row["digest"].endswith("cd" * 32)


def test_proof_without_receipt_has_failed(site: Site) -> None:
    site.job("22", "COMPLETED", verify=True)
    (row,) = rows(site.run("job", "collect", "jobs", "--json"))
    assert row["result"] == "failed" and "left no receipt" in row["detail"]


def test_table_and_csv_say_the_same(site: Site) -> None:
    folder = site.job("31", "COMPLETED", verify=True)
    receipt(folder, "gpu-1")
    receipt(folder, "gpu-2", passed=False, first_failure={"layer": "chat", "check": "x", "text": '[bold]=1+1, "q"\n'})
    table = site.run("job", "collect", "jobs").stdout
    assert table.index("gpu-2") < table.index("gpu-1") and "[bold]=1+1" in table and DIGEST[:19] in table
    read = list(csv.DictReader(io.StringIO(site.run("job", "collect", "jobs", "--csv", "-").stdout)))
    assert [row["node"] for row in read] == ["gpu-2", "gpu-1"]
    assert read[0]["detail"] == 'chat, x: [bold]=1+1, "q"\n' and read[1]["digest"] == DIGEST
    site.run("job", "collect", "jobs", "--csv", "out.csv")
    assert list(csv.DictReader((site.root / "out.csv").open(newline=""))) == read


def test_scheduler_that_is_gone_hides_no_receipt(site: Site) -> None:
    receipt(site.job("41", "COMPLETED", verify=True), "gpu-1")
    for name in ("scontrol", "squeue", "sacct"):
        (site.bin / name).write_text(
            "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
        )
    (row,) = rows(site.run("job", "collect", "jobs", "--json"))
    assert (row["result"], row["state"], row["node"]) == ("passed", "unknown", "gpu-1")


def test_forgotten_job_keeps_its_receipts(site: Site) -> None:
    receipt(site.job("42", "COMPLETED", verify=True), "gpu-1")
    site.job("43", "COMPLETED", verify=True)
    (site.bin / "scontrol").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
    )
    failed, passed = rows(site.run("job", "collect", "jobs", "--json"))
    assert (passed["job"], passed["state"]) == ("job-42", "lost")
    assert (failed["job"], failed["result"]) == ("job-43", "failed")


def test_receipts_without_a_job(site: Site) -> None:
    folder = site.root / "brought"
    folder.mkdir()
    receipt(folder, "gpu-1")
    (row,) = rows(site.run("job", "collect", "brought", "--json"))
    assert row["result"] == "passed" and row["digest"] == DIGEST
    done = site.run("job", "collect", "bin")
    assert done.returncode == 2 and "holds no job and no receipt" in done.stderr


# --- diagnose --job ------------------------------------------------------------------------------------------------


def test_all_ranks_and_the_accounting_are_read(site: Site) -> None:
    folder = site.job("51", "FAILED", "starting\n", nodes=2)
    (folder / "51-rank0.log").write_text(
        "step 1\n[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600031 milliseconds before timing out."
    )
    (folder / "51-rank1.log").write_text("step 1\n" + OOM.format(51))
    for word in ("51", "job-51", str(folder), str(folder / "job.json")):
        where = ["--job", word] if "/" in word else ["--job", str(folder)]
        done = site.run("diagnose", *where, "--json")
        assert done.returncode == 0, done.stderr
        first, second = json.loads(done.stdout)["findings"]
        assert first["id"] == "host-oom-kill" and second["id"] == "nccl-timeout"
        assert second["consequence_of"] == ["host-oom-kill"]
        assert [(row["file"], row["line"], row["rank"]) for row in first["evidence"]] == [("51-rank1.log", 2, "1")]
        assert [(row["file"], row["line"]) for row in second["evidence"]] == [("51-rank0.log", 2)]
    assert "51-rank1.log line 2 [rank 1]" in site.run("diagnose", "--job", str(folder)).stdout


def test_accounting_alone_tells(site: Site) -> None:
    folder = site.job("52", "NODE_FAIL", "step 1\nstep 2\n")
    (first, *_) = json.loads(site.run("diagnose", "--job", str(folder), "--json").stdout)["findings"]
    assert first["id"] == "node-fail" and first["evidence"][0]["file"] == "accounting.txt"


def test_driver_of_the_preflight_decides(site: Site) -> None:
    folder = site.job(
        "53", "FAILED", "torch 2.11.0+cu130\nCUDA driver version is insufficient for CUDA runtime version\n"
    )
    (folder / "preflight-53-gpu-1.json").write_text(json.dumps({"ok": True, "node": "gpu-1", "driver": "550.54.15"}))
    (first, *_) = json.loads(site.run("diagnose", "--job", str(folder), "--json").stdout)["findings"]
    assert (first["id"], first["confidence"]) == ("driver-too-old", "certain")


def test_job_that_is_not_known(site: Site) -> None:
    done = site.run("diagnose", "--job", "nowhere")
    assert done.returncode == 2 and "no job 'nowhere'" in done.stderr
    assert site.run("diagnose").returncode == 2
    assert site.run("diagnose", "a.log", "--job", "b").returncode == 2


def test_bundle_of_a_job_holds_all_and_no_secret(site: Site) -> None:
    token = "hf" + "_aBcDeFgHiJkLmNoPqRsTuVwXyZ012345"
    log = f"HF_TOKEN={token}\nloading /home/lovelace/data\n" + OOM.format(61)
    folder = site.job("61", "FAILED", log, env={"NOTE": "none"}, plan={"schema": 1, "variant": "cu126"})
    (folder / "plan.json").write_text(json.dumps({"schema": 1, "variant": "cu126"}))
    receipt(folder, "gpu-1", passed=False)
    for name in ("one.tar.gz", "two.tar.gz"):
        done = site.run("diagnose", "--job", str(folder), "--bundle", name)
        assert done.returncode == 0 and "hub-token" in done.stderr, done.stderr
    assert (site.root / "one.tar.gz").read_bytes() == (site.root / "two.tar.gz").read_bytes()
    with tarfile.open(site.root / "one.tar.gz") as tar:
        files = {item.name.partition("/")[2]: tar.extractfile(item).read().decode() for item in tar}  # type: ignore[union-attr]
    assert set(files) >= {
        "61.log", "accounting.txt", "job.json", "job.sh", "plan.json", "receipt-gpu-1.json", "findings.json",
        "findings.txt", "README.txt",
    }  # fmt: skip
    whole = "".join(files.values())
    assert token not in whole and "lovelace" not in whole
    assert json.loads(files["findings.json"])["findings"][0]["id"] == "host-oom-kill"
    assert json.loads(files["plan.json"])["variant"] == "cu126"
    assert not list(site.root.glob(".*tar*"))


def test_bundle_of_standard_input(site: Site) -> None:
    done = site.run("diagnose", "-", "--bundle", "x.tar.gz", stdin="password=opensesame1\nDUE TO TIME LIMIT\n")
    assert done.returncode == 0 and "time-limit" in done.stdout
    with tarfile.open(site.root / "x.tar.gz") as tar:
        assert "opensesame1" not in "".join(tar.extractfile(item).read().decode() for item in tar)  # type: ignore[union-attr]


def test_bundle_that_cannot_be_written(site: Site) -> None:
    done = site.run("diagnose", "-", "--bundle", "no/such/folder/x.tar.gz", stdin="x\n")
    assert done.returncode == 2 and "cannot write" in done.stderr


def test_record_is_of_this_shape() -> None:
    assert Record("slurm", "a", "k").to_json()["schema"] == 1
