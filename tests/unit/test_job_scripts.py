"""Rendered sbatch scripts: as they were (goldens), and run through a real bash with tools that only tell their argv.

Stood in for: srun, scontrol, squeue, docker, podman and apptainer, each a few lines that print what they were called
with, in the shape that the real ones have. The real Slurm is in tests/engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envforge.errors import DataError, UsageError
from envforge.jobs.bundle import image_environment
from envforge.jobs.model import JobSpec, Mount, check
from envforge.jobs.slurm import TOOLS, enroot_reference, job_name, render

GOLDEN = Path(__file__).parents[1] / "golden" / "jobs"
ENTRY = "/opt/envforge/bin/envforge-entrypoint"
BUNDLE = {"process": {"env": ["PATH=/x", "HF_HOME=/cache/hf", "QUOTED=it's $(id)"]}}
HOSTILE = (
    "it's $(touch HIT) `touch HIT`",
    'a "b" \\ c',
    "line\nbreak",
    "Zürich 東京 🦙",
    "*",
    "",
    "--",
    "a=b;c&d|e>f",
    "$HOME",
    "--name=@",
    "--node-rank=@",
    "--json=@",
    "--device=@",
)


def job(tool: str, **changes: Any) -> JobSpec:
    """A job of two nodes with all that a script can hold."""
    fields: dict[str, Any] = {
        "name": "train",
        "image": "registry.example:5000/envforge/unsloth:2.6.0-cu126-0123456789ab",
        "command": ("torchrun", "train.py", "--lr", "2e-4"),
        "nodes": 2,
        "gpus_per_node": 8,
        "cpus_per_task": 16,
        "memory_mib": 64000,
        "time_minutes": 600,
        "env": {"HF_HUB_OFFLINE": "1", "RUN": "first try"},
        "mounts": (Mount("/data/texts", "/data"),),
        "secrets": ("HF_TOKEN",),
        "partition": "gpu",
        "account": "lab",
        "constraint": "a100&nvlink",
        "requeue": True,
        "output": "/shared/jobs/train",
        "address": "ab" * 32,
        "image_digest": "sha256:" + "cd" * 32,
    }
    files = {"oci": "/shared/images/unsloth", "none": "/shared/envs/unsloth"}
    return check(JobSpec(**{**fields, "image_file": files.get(tool), **changes}))


@pytest.mark.parametrize("tool", TOOLS)
def test_scripts_are_as_they_were(tool: str) -> None:
    """ENVFORGE_GOLDEN=write renews them."""
    text = render(job(tool), tool, BUNDLE)
    path = GOLDEN / f"slurm-{tool}.sh"
    if os.environ.get("ENVFORGE_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(path)], check=True)


# --- run through a real shell --------------------------------------------------------------------------------------

SRUN = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
at = words.index("/bin/sh")
with open(os.environ["SLURM_TOLD"], "a") as file:
    file.write(json.dumps(["srun", words[:at], dict(os.environ)]) + "\\n")
# The container would bring the entrypoint: a stand-in tells its words.
bare = not {{"run", "exec"}} & set(words[at:])
tail = [os.environ["SLURM_STUBS"] + "/entrypoint" if bare and word == "{entry}" else word for word in words[at:]]
tasks = next((int(w.partition("=")[2]) for w in words if w.startswith("--ntasks=")), 1)
codes = []
for task in range(tasks):
    ids = {{"SLURM_PROCID": str(task), "SLURM_NODEID": str(task), "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0",
           "SLURMD_NODENAME": "n%d" % (task + 1), "SLURM_STEP_GPUS": "0,1"}}
    codes.append(subprocess.run(tail, env={{**os.environ, **ids}}).returncode)
sys.exit(max(codes))
"""
TELL = """#!{python}
import json, os, sys
with open(os.environ["SLURM_TOLD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ)]) + "\\n")
sys.exit(int(os.environ.get("SLURM_REFUSE", "0")) if "preflight" in sys.argv else 0)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Runs a script with stand-ins for the tools; -> exit code, what was told, and what the script said itself."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("docker", "podman", "apptainer", "entrypoint", "scancel"):
        (stubs / name).write_text(TELL.format(python=sys.executable))
    (stubs / "srun").write_text(SRUN.format(python=sys.executable, entry=ENTRY))
    (stubs / "scontrol").write_text("#!/bin/sh\n[ \"$2\" = hostnames ] && printf 'localhost\\nn2\\n'\n")
    for path in stubs.iterdir():
        path.chmod(0o755)

    def run(script: str, **env: str) -> tuple[int, list[list[Any]], str]:
        told = tmp_path / "told"
        told.unlink(missing_ok=True)
        place = tmp_path / "job.sh"
        place.write_text(script, encoding="utf-8")
        surroundings = {
            "PATH": f"{stubs}:{os.environ['PATH']}", "HOME": "/home/me", "LANG": "C.UTF-8", "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TOLD": str(told), "SLURM_STUBS": str(stubs), **env,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", str(place)],
            capture_output=True,
            text=True,
            env=surroundings,
            cwd=tmp_path,
            check=False,
            timeout=60,
        )
        rows = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
        return done.returncode, rows, done.stderr

    return run


def hostile(tool: str, tmp_path: Path) -> JobSpec:
    """A job whose every word of a user's is a trap."""
    sep = "" if tool == "pyxis" else ",:"
    output = str(tmp_path / f'out \'p"ut" %j $(touch HIT){sep} ü')
    image = {"none": str(tmp_path / "stubs 'x' $(touch HIT)"), "oci": "/images/it's"}.get(tool)
    mounts = (Mount(f'/data/it\'s "$(touch HIT)"{sep}', f"/in here{sep}"), Mount("/rw", "/rw", False))
    return job(
        tool, command=HOSTILE, env={"WORD": "\n".join(HOSTILE[:5]), "EMPTY": ""}, mounts=mounts, output=output,
        image_file=image, workdir="/work 'dir'", passed_variables=("LANG", "UNSET"),
    )  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_hostile_words_come_through_every_tool(shell: Any, tool: str, tmp_path: Path) -> None:
    spec = hostile(tool, tmp_path)
    if tool == "none":
        place = Path(spec.image_file or "") / "bin"
        place.mkdir(parents=True)
        (place / "envforge-entrypoint").write_text(TELL.format(python=sys.executable))
        (place / "envforge-entrypoint").chmod(0o755)
    leaks = {"LD_LIBRARY_PATH": "/nowhere", "PYTHONPATH": "/nowhere", "AWS_SECRET": "x", "BASH_FUNC_x%%": "() { :; }"}
    code, rows, said = shell(render(spec, tool, BUNDLE), HF_TOKEN="hush", **leaks)
    assert code == 0, said
    calls = [row for row in rows if row[0] not in ("srun", "scancel")]
    first = next(i for i, row in enumerate(calls) if "preflight" not in row[1])
    assert [("preflight" in row[1]) for row in calls] == [True] * 2 + [False] * 2  # each node first, then the tasks
    tasks = sorted(calls[first:], key=lambda row: row[2]["RANK"])  # those of a bundle start side by side
    for rank, (_, words, env) in enumerate(tasks):
        assert words[-len(HOSTILE) :] == list(HOSTILE)
        assert env["WORD"] == "\n".join(HOSTILE[:5])
        assert (env["EMPTY"], env["HF_TOKEN"], env["ENVFORGE_OUTPUT"]) == ("", "hush", spec.output)
        assert (env["RANK"], env["NODE_RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == (
            str(rank),
            str(rank),
            "2",
            "localhost",
        )
        assert env["MASTER_PORT"] == "20042"
        assert env["ENVFORGE_PREFLIGHT"] == "done"
        assert not {"LD_LIBRARY_PATH", "PYTHONPATH", "AWS_SECRET", "BASH_FUNC_x%%", "UNSET"} & set(env)
    assert not list(tmp_path.rglob("HIT"))
    assert "hush" not in render(spec, tool, BUNDLE)
    _check_tool(tool, spec, tasks[0][1], next(row[1] for row in rows if row[0] == "srun"), tasks[0][2])


def _check_tool(tool: str, spec: JobSpec, words: list[str], flags: list[str], env: dict[str, str]) -> None:
    """What each tool was told besides."""
    data, target = spec.mounts[0][:2]
    if tool == "pyxis":
        given = dict(flag.split("=", 1) for flag in flags if "=" in flag)
        assert given["--container-image"] == "docker://registry.example:5000#envforge/unsloth:2.6.0-cu126-0123456789ab"
        assert given["--container-mounts"] == f"{data}:{target}:ro,/rw:/rw,{spec.output}:{spec.output}"
        assert given["--container-workdir"] == "/work 'dir'"
        assert {"WORD", "HF_TOKEN", "RANK", "MASTER_ADDR"} <= set(given["--container-env"].split(","))
    elif tool in ("docker", "podman", "apptainer"):
        import csv

        mounts = [w.partition("=")[2] for w in words if w.startswith("--mount=")]
        mounts = mounts or [words[i + 1] for i, w in enumerate(words) if w == "--mount"]
        read = [next(csv.reader([row])) for row in mounts]
        assert read[0][1:3] == [f"source={data}", f"{'destination' if tool == 'apptainer' else 'target'}={target}"]
        assert read[2][1] == f"source={spec.output}"
        assert (len(read[0]), len(read[1]), len(read[2])) == (4, 3, 3)  # the first is read-only
        if tool == "docker":
            assert '--gpus="device=0,1"' in words
            assert "--name=envforge-42-0-0" in words
        if tool == "podman":
            assert [w for w in words if "gpu=" in w] == ["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=1"]
        if tool != "apptainer":
            assert {"--env=WORD", "--env=HF_TOKEN", "--env=RANK"} <= set(words)
    elif tool == "oci":
        assert f"--container={spec.output}/bundle" in flags
        assert (env["HF_HOME"], env["QUOTED"]) == ("/cache/hf", "it's $(id)")


def test_torchrun_gets_its_rendezvous_and_a_refused_node_stops_the_job(shell: Any, tmp_path: Path) -> None:
    spec = job("docker", output=str(tmp_path / "out"))
    code, rows, _ = shell(render(spec, "docker"), HF_TOKEN="x")
    assert code == 0
    words = [row[1] for row in rows if row[0] == "docker" and "torchrun" in row[1]]
    tails = [call[call.index("torchrun") :] for call in words]
    fixed = ["--master-addr=localhost", "--master-port=20042", "--nproc-per-node=8", "train.py", "--lr", "2e-4"]
    assert tails == [["torchrun", "--nnodes=2", f"--node-rank={rank}", *fixed] for rank in (0, 1)]

    code, rows, said = shell(render(spec, "docker"), HF_TOKEN="x", SLURM_REFUSE="86")
    assert code == 86
    assert not [row for row in rows if "torchrun" in row[1]]
    assert "the command was not started" in said

    code, rows, said = shell(render(spec, "docker"), HF_TOKEN="x", SLURM_REFUSE="125")
    assert code == 125
    assert "the container could not be started (exit code 125)" in said

    code, rows, said = shell(render(spec, "docker"))
    assert (code, rows) == (2, [])
    assert "the secret HF_TOKEN is not in the environment" in said


def test_torchrun_of_ones_own_is_left_alone() -> None:
    for words in (
        ("torchrun", "--standalone", "x.py"),
        ("torchrun", "--rdzv-backend=c10d", "x.py"),
        ("python", "x.py"),
    ):
        assert not job("docker", command=words).torchrun
    assert "--nproc-per-node=8" not in render(
        job("docker", command=("torchrun", "--nproc_per_node=2", "x.py")), "docker"
    )


@pytest.mark.parametrize(
    ("reference", "enroot"),
    [
        ("ubuntu:22.04", "docker://ubuntu:22.04"),
        ("library/ubuntu", "docker://library/ubuntu"),
        ("ghcr.io/a/b:c", "docker://ghcr.io#a/b:c"),
        ("localhost:5000/a/b:c", "docker://localhost:5000#a/b:c"),
        ("ghcr.io/a/b:c@sha256:" + "0" * 64, "docker://ghcr.io#a/b:c"),
        ("ghcr.io/a/b@sha256:" + "0" * 64, "docker://ghcr.io#a/b@sha256:" + "0" * 64),
        ("localhost/a", "docker://localhost#a"),
    ],
)
def test_references_are_told_as_enroot_reads_them(reference: str, enroot: str) -> None:
    assert enroot_reference(reference) == enroot


def test_all_faults_of_a_job_are_told_at_once() -> None:
    with pytest.raises(DataError) as caught:
        check(
            JobSpec(
                name="Bad Name", image="not a reference", env={"1X": "a", "LD_LIBRARY_PATH": "/x", "B": "nul\0"},
                mounts=(Mount("relative", "/x"),), nodes=0, requeue=True, partition="a b", output="/a\nb",
                workdir="x", image_digest="sha256:1",
            )
        )  # fmt: skip
    told = caught.value.cause
    for part in (
        "13 reasons", "name 'Bad Name'", "image: ", "command: there is none", "'1X'", "LD_LIBRARY_PATH", "NUL",
        "mount 'relative'", "nodes: 0", "requeue needs a time limit", "partition 'a b'", "output: ", "workdir",
        "digest",
    ):  # fmt: skip
        assert part in told, part


def test_what_a_tool_cannot_carry_is_refused() -> None:
    for tool, changes, words in (
        ("pyxis", {"mounts": (Mount("/a,b", "/x"),)}, "pyxis reads , and :"),
        ("oci", {"tasks_per_node": 2, "command": ("python",)}, "does not tell tasks apart"),
        ("docker", {"output": "/a\\b"}, "backslash"),
        ("docker", {"image": "", "image_file": "/x.sif"}, "only a file was given"),
        ("none", {"image_file": None}, "environment's folder"),
    ):
        with pytest.raises((DataError, UsageError)) as caught:
            render(job(tool, **changes), tool, BUNDLE)
        assert words in caught.value.cause, words
    with pytest.raises(UsageError, match="no container tool"):
        render(job("docker"), "shifter")
    assert image_environment({"process": {"env": ["A=b=c", "1=x", "junk", 7]}}) == {"A": "b=c"}


def test_the_key_is_the_same_for_the_same_job_and_no_other() -> None:
    keys = {job_name(job("docker", **c)) for c in ({}, {"nodes": 3}, {"env": {}}, {"attempt": 1}, {"plan": {"a": 1}})}
    assert len(keys) == 5
    assert job_name(job("docker")) == job_name(job("docker"))
    same = ({"output": "/elsewhere"}, {"image_file": "/copy.sqsh"}, {"plan": {"reasons": {"torch": "asked in /a"}}})
    plain = job("docker", plan={"reasons": {}}).key()
    assert [job("docker", **{"plan": {}, **c}).key() == plain for c in same] == [True, True, True]
    unknown = {"image_digest": None, "address": None, "image_file": "/a.sqsh"}
    assert job("docker", **unknown).key() != job("docker", **{**unknown, "image_file": "/b.sqsh"}).key()
    assert job("docker").key() != job("docker", mounts=(Mount("/other", "/data"),)).key(), "other data is another job"
    assert job("docker").key() == job("docker", env={"RUN": "first try", "HF_HUB_OFFLINE": "1"}).key()


def test_the_proof_writes_a_receipt_for_each_node(shell: Any, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    spec = job("docker", verify=True, command=("--model", "/m", "--json=@"), output=output, gpus_per_node=0)
    _, rows, _ = shell(render(spec, "docker"), HF_TOKEN="x")
    calls = [row[1][row[1].index("verify") :] for row in rows if row[0] == "docker" and "verify" in row[1]]
    assert calls == [
        ["verify", f"--json={output}/receipt-n{node}.json", "--grade=full", "--model", "/m", "--json=@"]
        for node in (1, 2)
    ]
