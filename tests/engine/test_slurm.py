"""Jobs on a real Slurm: submitted once, looked at first, told before their end, continued, cancelled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from environment_folder import GPU, make_environment, record_node
from slurm_cluster import Slurm

from envforge import spec

pytestmark = pytest.mark.engine

SCHEMA = json.loads((Path(spec.__file__).parent / "schemas" / "job.json").read_text())
HOSTILE = ("it's $(touch /tmp/envforge-hit) `id`", 'a "b" \\ c', "line\nbreak", "Zürich 東京", "*", "")
TELL = "import json, os, sys; print('TOLD ' + json.dumps([sys.argv[1:], os.environ.get('WORD'), sorted(os.environ)]))"


def envforge(slurm: Slurm, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, with libraries and secrets in its surroundings that must not leak."""
    argv = [sys.executable, "-c", "from envforge.cli import main; main()", *map(str, words)]
    hostile = {"LD_LIBRARY_PATH": "/nowhere", "PYTHONPATH_OF_MINE": "x", "AWS_SECRET": "hush", "SBATCH_EXPORT": "NONE"}
    surroundings = {**os.environ, **slurm.env, **hostile, **env}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=surroundings, timeout=120)


def submit(slurm: Slurm, *words: str | Path, **env: str) -> dict[str, Any]:
    """Submit one job; -> its row of the answer."""
    done = envforge(slurm, "job", "slurm", "--submit", "--json", *words, **env)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    jsonschema.validate(answer, SCHEMA)
    row: dict[str, Any] = answer["jobs"][0]
    return row


def status(slurm: Slurm, row: dict[str, Any]) -> dict[str, Any]:
    """What `job status` says."""
    done = envforge(slurm, "job", "status", row["output"], "--json")
    answer: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(answer, SCHEMA)
    return {**answer, "code": done.returncode}


def own_log(row: dict[str, Any]) -> str:
    """The job's own log."""
    return (Path(row["output"]) / f"{row['job_id']}.log").read_text()


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment for CPUs."""
    return make_environment(tmp_path_factory.mktemp("plain") / "env'ironment ü")


def test_words_of_users_reach_the_command_unharmed_and_nothing_else_does(
    slurm: Slurm, plain: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out \"put' %j $(id) ü"
    words = ["--output", output, "--env", f"WORD={HOSTILE[0]}\n{HOSTILE[1]}", "--secret", "HUSH", "--name", "hostile"]
    row = submit(slurm, plain, *words, "--", "python", "-c", TELL, *HOSTILE, HUSH="s3cret")
    assert slurm.wait(row["job_id"]) == "COMPLETED", own_log(row)
    told = next(line for line in own_log(row).splitlines() if line.startswith("TOLD "))
    arguments, word, names = json.loads(told.removeprefix("TOLD "))
    assert arguments == list(HOSTILE)
    assert word == f"{HOSTILE[0]}\n{HOSTILE[1]}"
    assert "HUSH" in names
    assert not {"LD_LIBRARY_PATH", "PYTHONPATH_OF_MINE", "AWS_SECRET"} & set(names)
    assert not Path("/tmp/envforge-hit").exists()
    assert "s3cret" not in (output / "job.sh").read_text() + (output / "job.json").read_text()

    answer = status(slurm, row)
    assert (answer["state"], answer["exit_code"], answer["code"]) == ("done", 0, 0)
    assert told in envforge(slurm, "job", "logs", output).stdout


def test_a_refused_node_stops_the_job_before_the_command(slurm: Slurm, tmp_path: Path) -> None:
    image = make_environment(tmp_path / "gpu", GPU)
    record_node(tmp_path / "facts" / "n1")
    record_node(tmp_path / "facts" / "n2", driver="470.57.02")
    marker = tmp_path / "ran"
    words = ["--output", tmp_path / "out", "--nodes", "2", "--env", f"ENVFORGE_RECORDED={tmp_path}/facts/{{node}}"]
    row = submit(slurm, image, *words, "--", "touch", marker)
    assert row["gpus"] == 1  # the image is for GPUs, so one is asked for
    assert slurm.wait(row["job_id"]) == "FAILED"
    assert slurm.exit_code(row["job_id"]) == "86:0"
    assert not marker.exists()
    log = own_log(row)
    assert log.count("preflight n1: ok") == 1
    assert log.count("preflight n2: refused: driver 470.57.02 is older than 525.60.13") == 1

    answer = status(slurm, row)
    assert answer["code"] == 86
    assert [(one["node"], one["id"]) for one in answer["refused"]] == [("n2", "driver-too-old")]


def test_a_cancelled_job_ends_and_stays_ended(slurm: Slurm, plain: Path, tmp_path: Path) -> None:
    # With a limit and requeue: cancelling sends SIGTERM as well, and must not be taken for the limit.
    words = ["--output", tmp_path, "--time", "10", "--requeue", "--", "python", "-c", "import time; time.sleep(300)"]
    row = submit(slurm, plain, *words)
    slurm.wait(row["job_id"], lambda word: word == "RUNNING")
    done = envforge(slurm, "job", "cancel", tmp_path)
    assert done.returncode == 0, done.stderr
    assert slurm.wait(row["job_id"]) == "CANCELLED"
    time.sleep(8)  # longer than a requeued job would wait
    assert slurm.state(row["job_id"]) == "CANCELLED"
    answer = status(slurm, row)
    assert (answer["state"], answer["restarts"], answer["code"]) == ("cancelled", 0, 1)


TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
place = Path(os.environ["ENVFORGE_OUTPUT"]) / "checkpoint.json"
step = json.loads(place.read_text())["step"] if place.exists() else 0
print(f"start at {step} after {os.environ['ENVFORGE_RESTARTS']} restarts", flush=True)
def told(number, frame):
    place.write_text(json.dumps({"step": step}))
    print(f"checkpoint at {step}", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
if step:
    print("finished", flush=True)
    sys.exit(0)
while True:
    step += 1
    time.sleep(0.05)
"""


def test_the_time_limit_leads_to_a_checkpoint_and_the_job_goes_on_from_it(
    slurm: Slurm, plain: Path, tmp_path: Path
) -> None:
    words = ["--output", tmp_path, "--time", "1", "--signal-seconds", "45", "--requeue", "--", "python", "-c", TRAINER]
    row = submit(slurm, plain, *words)
    assert slurm.wait(row["job_id"]) == "COMPLETED", own_log(row)
    log = own_log(row)
    step = json.loads((tmp_path / "checkpoint.json").read_text())["step"]
    assert step > 0
    parts = ["start at 0 after 0 restarts", f"checkpoint at {step}", "back to the queue",
             f"start at {step} after 1 restarts", "finished"]  # fmt: skip
    assert [log.index(part) for part in parts] == sorted(log.index(part) for part in parts)
    assert status(slurm, row)["restarts"] == 1


KILLER = """#!/bin/sh
# Slurm takes the job, and before its answer is heard the client is killed.
{sbatch} "$@" >/dev/null
kill -KILL $PPID
sleep 60
"""


def test_a_job_is_started_once_even_when_the_client_is_killed_before_the_answer(
    slurm: Slurm, plain: Path, tmp_path: Path
) -> None:
    count = "import os, time; open(os.environ['ENVFORGE_OUTPUT'] + '/runs', 'a').write('x'); time.sleep(3)"
    words = [plain, "--output", tmp_path / "out", "--name", "once", "--", "python", "-c", count]
    fake = tmp_path / "bin"
    fake.mkdir()
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    (fake / "sbatch").write_text(KILLER.format(sbatch=real))
    (fake / "sbatch").chmod(0o755)
    killed = envforge(slurm, "job", "slurm", "--submit", *words, PATH=f"{fake}:{os.environ['PATH']}")
    assert killed.returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "out" / "job.json").read_text())["state"] == "submitting"

    row = submit(slurm, *words)
    assert row["new"] is False
    slurm.wait(row["job_id"])
    assert submit(slurm, *words)["job_id"] == row["job_id"]  # also when it has ended
    (tmp_path / "out" / "job.json").unlink()  # and when the record is lost
    assert submit(slurm, *words)["job_id"] == row["job_id"]
    assert (tmp_path / "out" / "runs").read_text() == "x"

    other = [plain, "--output", tmp_path / "elsewhere", *words[3:]]
    from_there = submit(slurm, *other)
    assert from_there["new"] is False and from_there["job_id"] == row["job_id"], "asked for from another folder"
    assert from_there["output"] == str(tmp_path / "out"), "its traces are where they are"
    assert status(slurm, {**from_there, "output": str(tmp_path / "elsewhere")})["state"] == "done"

    again = submit(slurm, plain, "--again", "1", *words[1:])
    assert again["new"] is True
    slurm.wait(again["job_id"])
    assert (tmp_path / "out" / "runs").read_text() == "xx"


def test_slurm_refusing_or_not_answering_is_told_in_its_own_words(slurm: Slurm, plain: Path, tmp_path: Path) -> None:
    words = [plain, "--output", tmp_path / "out", "--submit"]
    refused = envforge(slurm, "job", "slurm", *words, "--partition", "nowhere", "--", "true")
    assert refused.returncode == 3
    assert "invalid partition specified: nowhere" in refused.stderr
    assert "hint: name another --partition" in refused.stderr

    too_much = envforge(slurm, "job", "slurm", *words, "--gpus", "5", "--", "true")
    assert too_much.returncode == 3
    assert "Requested node configuration is not available" in too_much.stderr

    down = tmp_path / "down.conf"
    text = (slurm.folder / "slurm.conf").read_text()
    lines = [line if not line.startswith("SlurmctldPort=") else "SlurmctldPort=1" for line in text.splitlines()]
    down.write_text("\n".join([*lines, "MessageTimeout=2", ""]))
    silent = envforge(slurm, "job", "slurm", *words, "--", "true", SLURM_CONF=str(down))
    assert silent.returncode == 3
    assert "the controller does not answer" in silent.stderr

    missing = envforge(slurm, "job", "slurm", *words, "--", "true", PATH=str(Path(sys.executable).parent))
    assert missing.returncode == 3
    assert "squeue is not on this machine" in missing.stderr


def test_each_kind_of_node_gets_the_image_that_covers_it(slurm: Slurm, tmp_path: Path) -> None:
    old = make_environment(tmp_path / "old", {**GPU, "planned_sm": ["7.0"]})
    new = make_environment(tmp_path / "new", {**GPU, "planned_sm": ["8.0"], "driver_floor": "560.28.03"})
    record_node(tmp_path / "facts" / "n1", driver="570.86.15")
    record_node(tmp_path / "facts" / "n2", name="Tesla V100-SXM2-32GB", sm="7.0")
    listing = tmp_path / "nodes.txt"
    listing.write_text(slurm("scontrol", "show", "node", "--oneliner"))
    hosts = [f"--host={tmp_path}/facts/{node}" for node in ("n1", "n2")]
    words = ["--fleet", listing, *hosts, "--output", tmp_path / "out", "--name", "all"]
    words += ["--env", f"ENVFORGE_RECORDED={tmp_path}/facts/{{node}}", "--", "true"]
    done = envforge(slurm, "job", "slurm", "--submit", "--json", new, old, *words)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["jobs"]
    assert [(row["name"], row["hosts"]) for row in rows] == [("all-1", ["n1"]), ("all-2", ["n2"])]
    for row, node in zip(rows, ("n1", "n2"), strict=True):
        assert slurm.wait(row["job_id"]) == "COMPLETED", own_log(row)
        assert status(slurm, row)["nodes"] == node

    alone = envforge(slurm, "job", "slurm", "--json", new, *words)
    assert alone.returncode == 1
    (left,) = json.loads(alone.stdout)["uncovered"]
    assert left["host"] == "n2"
    assert "driver 550.54.15 is older than 560.28.03" in left["reason"]
