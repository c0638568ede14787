"""job on the command line: which image is meant, what is told, and Slurm's answers (its programs are stood in for)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from envforge import spec
from envforge.cli import main
from envforge.cli.job_options import from_folder, is_reference, mounts, pairs
from envforge.errors import EnvforgeError
from envforge.jobs import scheduler
from envforge.jobs.fleet import Needs, assign
from envforge.jobs.follow import find_record
from envforge.jobs.record import Record, read_record, write_record
from envforge.resolver.hosts import make_host
from envforge.resolver.plan import Plan, Target

SCHEMA = json.loads((Path(spec.__file__).parent / "schemas" / "job.json").read_text())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line here; -> exit code, stdout, stderr. No engine and no Slurm but the stand-ins answer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("sh", "env"):
        (stubs / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(stubs))

    def call(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        out = capsys.readouterr()
        return int(stop.value.code or 0), out.out, out.err

    return call


def program(folder: Path, name: str, text: str) -> None:
    """A stand-in for one of Slurm's programs."""
    (folder / "stubs" / name).write_text("#!/bin/sh\n" + text)
    (folder / "stubs" / name).chmod(0o755)


PLAN = Plan("3.12", "cu126", "native", {"torch": "2.6.0"}, (), Target("x86_64", None, None, "560.28.03", ("8.0",)))


def project(folder: Path, **build: Any) -> Path:
    """A project that was built."""
    folder.mkdir()
    (folder / "plan.json").write_text(PLAN.dumps())
    data = {
        "engine": "docker",
        "reference": "envforge/x:1",
        "digest": "sha256:" + "1" * 64,
        "address": "2" * 64,
        **build,
    }
    (folder / "build.json").write_text(json.dumps(data))
    return folder


def test_a_project_becomes_a_script_on_stdout(run: Any, tmp_path: Path) -> None:
    code, out, err = run(
        "job", "slurm", project(tmp_path / "My Run"), "--container-tool", "docker", "--", "python", "-V"
    )
    assert (code, err) == (0, "")
    assert "#SBATCH --job-name=my-run." in out
    assert "#SBATCH --gres=gpu:1\n" in out  # its plan is for GPUs
    assert f"export ENVFORGE_IMAGE_DIGEST=sha256:{'1' * 64}\n" in out
    assert f"--address={'2' * 64}" in out
    assert not (tmp_path / "envforge-jobs").exists()


def test_with_a_folder_the_script_and_a_record_are_kept(run: Any, tmp_path: Path) -> None:
    words = [
        "job",
        "slurm",
        "ghcr.io/a/b:c",
        "--container-tool",
        "pyxis",
        "-o",
        tmp_path / "out",
        "--json",
        "--",
        "true",
    ]
    code, out, _ = run(*words)
    answer = json.loads(out)
    jsonschema.validate(answer, SCHEMA)
    assert code == 0
    assert answer["jobs"][0]["script"] == str(tmp_path / "out" / "job.sh")
    assert (tmp_path / "out" / "job.sh").stat().st_mode & 0o111
    record = read_record(tmp_path / "out")
    assert record is not None
    assert (record.state, record.job_id, record.key) == ("written", None, answer["jobs"][0]["key"])
    assert run("job", "status", tmp_path / "out")[0] == 3  # never submitted


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--", "true"], 2, "no image is named"),
        (["a/b:c", "--container-tool", "docker"], 2, "command: there is none"),
        (["a/b:c", "--container-tool", "shifter", "--", "x"], 2, "no container tool is named 'shifter'"),
        (["a/b:c", "--", "x"], 2, "no container tool is to be seen"),
        (["a/b:c", "torch", "--", "x"], 2, "'torch' stands beside images"),
        (["a/b:c", "d/e:f", "--container-tool", "docker", "--", "x"], 2, "describe them with --fleet"),
        (["a/b:c", "--image-file", "x.tar", "--", "x"], 2, "x.tar is no .sqsh, .sif"),
        (["a/b:c", "--env", "NOVALUE", "--container-tool", "docker", "--", "x"], 2, "has no ="),
        (["a/b:c", "--mount", "nocolon", "--container-tool", "docker", "--", "x"], 2, "not of the form"),
        (["a/b:c", "--image-file", "x", "--container-tool", "oci", "--", "x"], 2, "more than a script"),
        (["--image-file", "x", "--container-tool", "oci", "-o", "o", "--", "x"], 2, "x/config.json: No such file"),
        (["a/b:c", "--container-tool", "docker", "--submit", "--secret", "NOT_SET_HERE", "--", "x"], 2, "not set here"),
        (["a/b:c", "--container-tool", "docker", "--verify"], 2, "the proof needs a model"),
        (["a/b:c", "--container-tool", "docker", "--submit", "--", "x"], 3, "squeue is not on this machine"),
    ],
)
def test_what_is_wrong_is_told(run: Any, words: list[str], code: int, told: str) -> None:
    done, out, err = run("job", "slurm", *words)
    assert (done, out) == (code, "")
    assert told in err
    assert "hint:" in err


def test_auto_goes_by_the_image_file_then_by_what_is_there(run: Any, tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "envforge-entrypoint").touch()
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "config.json").write_text("{}")
    (tmp_path / "bundle" / "rootfs").mkdir()
    for name, tool in (("x.sqsh", "pyxis"), ("x.sif", "apptainer"), ("bundle", "oci"), ("env", "none")):
        out = run("job", "slurm", "a/b:c", "--image-file", name, "--output", name + ".out", "--json", "--", "true")[1]
        assert json.loads(out)["jobs"][0]["tool"] == tool
    program(tmp_path, "podman", "")
    assert json.loads(run("job", "slurm", "a/b:c", "--json", "--", "true")[1])["jobs"][0]["tool"] == "podman"
    program(tmp_path, "srun", "echo '      --container-image=[USER@]'")
    assert json.loads(run("job", "slurm", "a/b:c", "--json", "--", "true")[1])["jobs"][0]["tool"] == "pyxis"


def test_words_of_the_line() -> None:
    assert [is_reference(w) for w in ("a/b", "a:1", "a@sha256:" + "0" * 64, "localhost:5000/a")] == [True] * 4
    assert [is_reference(w) for w in ("torch", "torch==2.6", "a[b]>=1", "x @ git+https://y/z", "A/B")] == [False] * 5
    assert pairs(["A=b=c", "E="]) == {"A": "b=c", "E": ""}
    here = Path.cwd()
    assert mounts(["/a:/b", "x:/y:rw", "/c:d:/e:ro"]) == (
        ("/a", "/b", True), (str(here / "x"), "/y", False), ("/c:d", "/e", True),
    )  # fmt: skip


def test_a_built_folder_says_what_it_is(tmp_path: Path) -> None:
    pushed = project(tmp_path / "pushed", registry={"image": "r.example/x@sha256:" + "3" * 64})
    assert from_folder(pushed).image == "r.example/x@sha256:" + "3" * 64
    venv = from_folder(project(tmp_path / "venv", engine="venv", reference="."))
    assert (venv.image, venv.image_file) == ("", str(tmp_path / "venv"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(EnvforgeError, match=r"no build\.json"):
        from_folder(tmp_path / "empty")
    with pytest.raises(EnvforgeError, match="changed since it was built"):
        from_folder(project(tmp_path / "moved-on", plan_hash="4" * 64))
    assert from_folder(project(tmp_path / "as-built", plan_hash=PLAN.hash())).plan == PLAN
    (pushed / "build.json").write_text("[]")
    with pytest.raises(EnvforgeError, match="damaged"):
        from_folder(pushed)


def test_hosts_go_to_the_first_image_that_covers_them() -> None:
    hosts = [
        make_host("h100", "570.86.15", ["sm_90"], labels={"slurm.features": "h100,ib"}),
        make_host("a100", "550.54.15", ["sm_80"], labels={"slurm.features": "a100,ib"}),
        make_host("l40", "550.54.15", ["sm_89"], labels={"slurm.features": "l40"}),
        make_host("v100", "470.57.02", ["sm_70"]),
        make_host("arm", "570.86.15", ["sm_90"], arch="aarch64"),
        make_host("cpu", "none"),
    ]
    images = [Needs("cu128", "570.26", ("9.0",), "x86_64"), Needs("cu118", "450.80.02", ("8.0",), "x86_64")]
    found = assign(images, hosts)
    assert [(g.image, g.hosts, g.feature) for g in found.groups] == [(0, ("h100",), "h100"), (1, ("a100", "l40"), None)]
    assert found.others(found.groups[1]) == ("h100", "v100", "arm", "cpu")
    reasons = dict(found.uncovered)
    assert list(reasons) == ["v100", "arm", "cpu"]
    assert "driver 470.57.02 is older than 570.26" in reasons["v100"]
    assert "sm_70, the image was planned for sm_80" in reasons["v100"]
    assert "it is aarch64" in reasons["arm"]
    assert "no GPU" in reasons["cpu"]
    assert assign([Needs("cpu")], hosts).uncovered == ()


SHOWN = "JobId=7 JobName=x JobState={state} Reason={reason} Restarts=2 ExitCode={code} NodeList=n[1-2] StdOut=/x"


@pytest.mark.parametrize(
    ("word", "code", "state", "exit_code"),
    [
        ("PENDING", "0:0", "waiting", None),
        ("RUNNING", "0:0", "running", None),
        ("COMPLETED", "0:0", "done", 0),
        ("FAILED", "86:0", "failed", 86),
        ("TIMEOUT", "0:15", "timeout", 143),
        ("CANCELLED", "0:15", "cancelled", 143),
        ("NODE_FAIL", "0:0", "failed", 0),
        ("OUT_OF_MEMORY", "0:125", "failed", 253),
    ],
)
def test_slurms_states(run: Any, tmp_path: Path, word: str, code: str, state: str, exit_code: int | None) -> None:
    program(tmp_path, "scontrol", f"echo '{SHOWN.format(state=word, reason='None', code=code)}'")
    found = scheduler.status(Record("slurm", "x", "", job_id="7"))
    assert (found.state, found.exit_code, found.word, found.nodes, found.restarts) == (
        state,
        exit_code,
        word,
        "n[1-2]",
        2,
    )


def test_a_job_that_the_controller_forgot_is_asked_of_the_accounting(run: Any, tmp_path: Path) -> None:
    write_record(Record("slurm", "x", "k", "submitted", "7", output=str(tmp_path / "envforge-jobs" / "x")))
    program(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    program(tmp_path, "sacct", "echo 'CANCELLED by 0|None|0:15|n1|0'")
    code, out, _ = run("job", "status", "x", "--json")
    assert (code, json.loads(out)["state"]) == (1, "cancelled")
    program(tmp_path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    code, out, _ = run("job", "status", "7")
    assert code == 3
    assert "lost" in out
    program(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    code, _, err = run("job", "status", "x")
    assert code == 3
    assert "the controller does not answer" in err
    assert find_record("7", tmp_path / "envforge-jobs").name == "x"
    code, _, err = run("job", "status", "nothing")
    assert (code, "known here: x" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "--account",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid",
            "--time",
        ),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)", "limit"),
        ("sbatch: error: Invalid generic resource (gres) specification", "GPUs of each node"),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", "looks first"),
        ('sbatch: error: Munge encode failed: Failed to access "/run/munge"', "munge"),
        ("sbatch: error: something new", "Slurm's own"),
    ],
)
def test_slurms_words_are_kept_and_get_a_hint(words: str, hint: str) -> None:
    found = scheduler.failure("Slurm did not take the job", words)
    assert found.exit_code == 3
    assert words.partition("error: ")[2] in found.cause
    assert hint in found.hint


def test_another_job_of_the_same_name_is_not_replaced_while_it_runs(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "squeue", "exit 0")
    program(tmp_path, "sacct", "exit 1")
    program(tmp_path, "sbatch", 'echo "$@" >>sbatch-told; env >env-told; echo "7;cluster"')
    program(tmp_path, "scontrol", f"echo '{SHOWN.format(state='RUNNING', reason='None', code='0:0')}'")
    monkeypatch.setenv("LEAK_OF_MINE", "x")
    words = ["job", "slurm", "a/b:c", "--container-tool", "docker", "--name", "one", "--submit", "--json", "--"]
    code, out, err = run(*words, "first")
    assert (code, json.loads(out)["jobs"][0]["job_id"]) == (0, "7"), err
    assert "LEAK_OF_MINE" not in (tmp_path / "env-told").read_text()
    assert json.loads(run(*words, "first")[1])["jobs"][0]["new"] is False
    code, _, err = run(*words, "second")
    assert code == 2
    assert "another job named one (number 7) is still under way" in err
    program(tmp_path, "scontrol", f"echo '{SHOWN.format(state='COMPLETED', reason='None', code='0:0')}'")
    assert json.loads(run(*words, "second")[1])["jobs"][0]["new"] is True
    assert len((tmp_path / "sbatch-told").read_text().splitlines()) == 2


def test_writing_a_submitted_job_again_forgets_nothing(run: Any, tmp_path: Path) -> None:
    for name, text in (("sbatch", 'echo "7"'), ("squeue", "exit 0"), ("sacct", "exit 1")):
        program(tmp_path, name, text)
    words = ["job", "slurm", "a/b:c", "--container-tool", "docker", "-o", tmp_path / "out"]
    assert run(*words, "--submit", "--", "true")[0] == 0
    assert run(*words, "--", "true")[0] == 0
    record = read_record(tmp_path / "out")
    assert record is not None and (record.state, record.job_id) == ("submitted", "7")
    assert run(*words, "--", "false")[0] == 0
    record = read_record(tmp_path / "out")
    assert record is not None and (record.state, record.job_id) == ("written", None), "another job"


def test_the_same_job_from_another_checkout_is_found_with_its_traces(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        project(tmp_path / name)
        (tmp_path / name / "p").mkdir()
    program(tmp_path, "sbatch", 'echo "7"')
    program(tmp_path, "squeue", "exit 0")
    program(tmp_path, "sacct", "exit 1")
    words = ["job", "slurm", "../../a", "--container-tool", "docker", "--submit", "--json", "--", "true"]
    monkeypatch.chdir(tmp_path / "a" / "p")
    row = json.loads(run(*words)[1])["jobs"][0]
    folder = tmp_path / "a" / "p" / "envforge-jobs" / "a"
    assert row["new"] and row["output"] == str(folder)

    # Slurm has it; asked for from a folder that knows nothing of it.
    program(tmp_path, "squeue", f"echo '7|envforge:{row['key']}|{folder}'")
    monkeypatch.chdir(tmp_path / "b" / "p")
    found = json.loads(run(*words)[1])["jobs"][0]
    assert (found["new"], found["job_id"], found["output"]) == (False, "7", str(folder))
    assert found["script"] == str(folder / "job.sh")
    record = read_record(tmp_path / "b" / "p" / "envforge-jobs" / "a")
    assert record is not None and record.output == str(folder), "here it is remembered, there are its logs"
    # A folder that holds no record of this job is none of its traces.
    program(tmp_path, "squeue", f"echo '7|envforge:{row['key']}|{tmp_path}'")
    (tmp_path / "b" / "p" / "envforge-jobs" / "a" / "job.json").unlink()
    assert json.loads(run(*words)[1])["jobs"][0]["output"] == str(tmp_path / "b" / "p" / "envforge-jobs" / "a")

    # A record whose key still held the folder.
    old = tmp_path / "b" / "p" / "envforge-jobs" / "a" / "job.json"
    known = json.loads(old.read_text())
    old.write_text(json.dumps({**known, "key": "0" * 16, "job_id": "6"}))
    program(tmp_path, "scontrol", f"echo '{SHOWN.format(state='COMPLETED', reason='None', code='0:0')}'")
    assert run("job", "status", "a")[0] == 0


def test_the_proof_gets_the_small_model_where_none_is_named(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "envforge" / "models" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    (folder / "envforge-model.json").touch()
    words = ["job", "slurm", "a/b:c", "--verify", "--container-tool", "docker"]
    out = run(*words)[1]
    assert f"--mount=type=bind,source={folder},target=/envforge-model,readonly" in out
    assert "    --model\n    /envforge-model\n" in out
    out = run(*words, "--", "--model", "/mine")[1]
    assert "envforge-model" not in out
    assert "    verify\n    --json=@\n    --grade=full\n    --model\n    /mine\n" in out


def test_words_that_were_built_from_name_their_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock and the engine are stood in for: what counts is which of the engine's images is taken."""
    from types import SimpleNamespace

    from envforge.cli import job_options, planned
    from envforge.cli.target import Targets
    from envforge.image import engines
    from envforge.image.engines import ImageInfo
    from envforge.image.render import pack_plan

    labels = {"envforge.variant": "cu126", "envforge.plan": pack_plan(PLAN), "envforge.address": "5" * 64}
    images = [
        ImageInfo("sha256:" + "1" * 64, ("x:cpu",), {**labels, "envforge.variant": "cpu"}, 1),
        ImageInfo("sha256:" + "2" * 64, (), labels, 1),  # a build that did not pass has no name
        ImageInfo("sha256:" + "3" * 64, ("x:good",), labels, 1),
    ]
    asked = []

    def find(label: str, value: str) -> list[ImageInfo]:
        asked.append((label, value))
        return images

    found = SimpleNamespace(plan=PLAN, lock=SimpleNamespace(hash="lock"), spec=SimpleNamespace(name="x"))
    monkeypatch.setattr(planned, "find_plan", lambda *args, **options: found)
    monkeypatch.setattr(planned, "surroundings", lambda *args: None)
    monkeypatch.setattr(engines, "choose_engine", lambda name: SimpleNamespace(find=find))
    source = job_options.from_request(["torch"], [], None, Targets())
    assert asked == [("envforge.lock-hash", "lock")]
    assert (source.image, source.digest, source.address) == ("x:good", "sha256:" + "3" * 64, "5" * 64)
    assert source.plan == PLAN
    images.clear()
    with pytest.raises(EnvforgeError, match="not built yet"):
        job_options.from_request(["torch"], [], None, Targets())
