"""Submitting to Kubernetes, and what became of a job: against a server on loopback that speaks the calls used."""

from __future__ import annotations

import io
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kube_server import Cluster, kubeconfig, serving

import envforge.spec
from envforge.cli import main
from envforge.diagnose import diagnose
from envforge.errors import OutsideError, UsageError
from envforge.jobs.follow import find_record, follower, preflights
from envforge.jobs.manifest import RECEIPT_BEGIN, RECEIPT_END, job_name, manifests
from envforge.jobs.model import JobSpec
from envforge.jobs.record import read_record, write_record

pytest.importorskip("kubernetes")
from envforge.jobs.kubernetes import accounting, cancel, log_files, status, submit

SCHEMA = json.loads((Path(envforge.spec.__file__).parent / "schemas" / "job.json").read_text())
RECEIPTS = Path(__file__).parent.parent / "cases" / "receipts"
IMAGE = "registry.example/train@sha256:" + "0" * 64


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving() as found:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", found.url)))
        monkeypatch.chdir(tmp_path)
        yield found


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return JobSpec("train", image=IMAGE, command=("torchrun", "t.py"), nodes=2, output=str(tmp_path / "train"))


def submitted(spec: JobSpec) -> tuple[Any, bool]:
    return submit(spec, manifests(spec))


def failed(code: int, **more: Any) -> dict[str, Any]:
    return {"phase": "Failed", "containerStatuses": [
        {"name": "job", "state": {"terminated": {"exitCode": code, "reason": "Error", **more}}}]}  # fmt: skip


def found_in(text: str) -> list[str]:
    return [finding.id for finding in diagnose(io.BytesIO(text.encode())).findings]


def test_what_was_made_arrives_and_belongs_together(cluster: Cluster, spec: JobSpec) -> None:
    record, new = submitted(spec)
    assert new and record.job_id == job_name(spec) and record.extra == {"namespace": "ml", "context": "here"}
    job, service = cluster.job(record.job_id), cluster.objects["services", "ml", record.job_id]
    wanted_job, wanted_service = manifests(spec)
    assert job["spec"] == wanted_job["spec"]
    assert service["spec"] == wanted_service["spec"]
    assert service["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]


def test_the_same_job_is_started_once(cluster: Cluster, spec: JobSpec, tmp_path: Path) -> None:
    first, _ = submitted(spec)
    again, new = submitted(spec)
    assert again == first and not new
    (tmp_path / "train" / "job.json").unlink()  # another machine, or a folder that was cleaned
    once_more, new = submitted(spec)
    assert not new and once_more.job_id == first.job_id
    assert len([key for key in cluster.objects if key[0] == "jobs"]) == 1
    elsewhere, new = submitted(replace(spec, output=str(tmp_path / "checkout" / "train")))
    assert not new and elsewhere.job_id == first.job_id, "the same words from another folder"
    assert read_record(tmp_path / "checkout" / "train") == elsewhere
    other, new = submitted(replace(spec, attempt=1, output=str(tmp_path / "again")))
    assert new and other.job_id != first.job_id


def test_a_record_from_before_the_folder_stopped_counting_is_still_this_job(cluster: Cluster, spec: JobSpec) -> None:
    first, _ = submitted(spec)
    old = replace(first, key=spec.known_keys()[1], job_id="train-of-an-older-release")
    write_record(old)
    assert old.key != spec.key()
    assert submitted(spec) == (old, False)


@pytest.mark.parametrize("kind", ["jobs", "services"])
def test_client_cut_off_between_submit_and_answer(cluster: Cluster, spec: JobSpec, kind: str) -> None:
    cluster.drop_after = kind
    with pytest.raises(OutsideError):
        submitted(spec)
    before = read_record(Path(spec.output))
    assert before is not None and before.state == "submitting"
    cluster.drop_after = None
    record, new = submitted(spec)
    assert not new and record.state == "submitted"
    assert sorted(key[0] for key in cluster.objects) == ["jobs", "services"]


def test_killed_client_does_not_start_a_second(cluster: Cluster, tmp_path: Path) -> None:
    """A real process, ended by SIGKILL while it waits for the answer."""
    taken = threading.Event()
    words = ["job", "kubernetes", IMAGE, "--gpus", "0", "--name", "train", "--submit", "--", "python", "t.py"]
    program = "from envforge.cli import main; import sys; main(sys.argv[1:])"

    class Held(dict):  # type: ignore[type-arg]
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            taken.set()
            threading.Event().wait(30 if key[0] == "jobs" else 0)

    cluster.objects = Held(cluster.objects)
    client = subprocess.Popen([sys.executable, "-c", program, *words], cwd=tmp_path)
    assert taken.wait(60)
    client.kill()
    client.wait()
    cluster.objects = dict(cluster.objects)
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is there already" in done.stderr
    assert [key[2] for key in cluster.objects if key[0] == "jobs"] == [done.stdout.strip()]


def test_another_job_of_that_name_is_left_alone(cluster: Cluster, spec: JobSpec) -> None:
    submitted(spec)
    cluster.job(job_name(spec))["metadata"]["annotations"]["envforge/key"] = "other"
    with pytest.raises(UsageError, match="is another one"):
        (Path(spec.output) / "job.json").unlink()
        submitted(spec)


def test_being_deleted(cluster: Cluster, spec: JobSpec) -> None:
    submitted(spec)
    (Path(spec.output) / "job.json").unlink()
    cluster.job(job_name(spec))["metadata"]["deletionTimestamp"] = "2026-11-02T10:00:00Z"
    with pytest.raises(OutsideError, match="being deleted"):
        submitted(spec)


# --- refusals: exit 3, the cluster's words, and a finding ------------------------------------------------------------

QUOTA = (
    'jobs.batch "train" is forbidden: exceeded quota: team, requested: count/jobs.batch=1, limited: count/jobs.batch=9'
)
RBAC = 'jobs.batch is forbidden: User "ada" cannot create resource "jobs" in API group "batch" in the namespace "ml"'
POD_SECURITY = (
    'jobs.batch "train" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes (volume "host-0")'
)


@pytest.mark.parametrize(
    ("status_", "message", "id_"),
    [
        (403, QUOTA, "quota"),
        (403, RBAC, "cluster-auth"),
        (403, POD_SECURITY, "k8s-refused"),
        (401, "Unauthorized", "cluster-auth"),
        (404, 'namespaces "ml" not found', "k8s-refused"),
        (422, 'Job.batch "train" is invalid: spec.template.spec.containers[0].image: Invalid value', "k8s-refused"),
        (400, 'strict decoding error: unknown field "spec.backoffLimitPerIndex"', "k8s-refused"),
    ],
)
def test_refusals_are_told_and_known(
    cluster: Cluster, spec: JobSpec, status_: int, message: str, id_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.fail["POST", "/jobs"] = (status_, message)
    with pytest.raises(SystemExit) as stopped:
        main(["job", "kubernetes", IMAGE, "--gpus", "0", "--submit", "--", "python", "t.py"])
    assert stopped.value.code == 3
    said = capsys.readouterr().err
    assert message[:60] in said and "hint:" in said
    assert found_in(said)[0] == id_
    record = read_record(Path("envforge-jobs/train"))
    assert record is not None and record.state == "written"  # it was refused for certain: nothing to look for


def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, **more: Any) -> str:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", url, **more)))
    spec = JobSpec("train", image=IMAGE, command=("python",), output=str(tmp_path / "train"))
    with pytest.raises(OutsideError) as caught:
        submitted(spec)
    assert caught.value.exit_code == 3 and caught.value.hint
    record = read_record(tmp_path / "train")
    assert record is None or record.state == "submitting"
    return caught.value.cause


def test_connection_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can answer there
        cause = unreachable(tmp_path, monkeypatch, f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert found_in(cause) == ["scheduler-unreachable"]


def test_unknown_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key", "-out", "cert", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as plain:
        plain.settimeout(30)

        def shake() -> None:
            while True:
                try:
                    client, _ = plain.accept()
                except OSError:
                    return
                with client:
                    try:
                        context.wrap_socket(client, server_side=True).close()
                    except OSError:
                        continue

        threading.Thread(target=shake, daemon=True).start()
        cause = unreachable(tmp_path, monkeypatch, f"https://127.0.0.1:{plain.getsockname()[1]}")
    assert found_in(cause)[0] == "tls-ca"


@pytest.mark.parametrize("text", ["", "{", "kind: Config\ncurrent-context: gone\n", "[]"])
def test_no_usable_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    spec = JobSpec("train", image=IMAGE, command=("python",), output=str(tmp_path / "train"))
    with pytest.raises(OutsideError, match="no cluster is known here"):
        submitted(spec)


def test_without_the_client(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['kubernetes'] = None\nfrom envforge.cli import main\n"
        f"main(['job', 'kubernetes', '{IMAGE}', '--gpus', '0', '--submit', '--', 'python'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3 and "kubernetes client is not installed" in done.stderr
    assert "kubectl apply" in done.stderr and "Traceback" not in done.stderr


# --- what became of it ---------------------------------------------------------------------------------------------


def test_from_waiting_to_done(cluster: Cluster, spec: JobSpec) -> None:
    record, _ = submitted(spec)
    name = record.job_id or ""
    assert (status(record).state, status(record).reason) == ("waiting", "no pod was made yet")
    for index in range(2):
        cluster.pod(name, index, node=f"gpu-{index + 1}", phase="Running")
    state = status(record)
    assert (state.state, state.nodes) == ("running", "gpu-1,gpu-2")
    cluster.job(name)["status"] = {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 2}
    assert (status(record).state, status(record).exit_code, status(record).ended) == ("done", 0, True)
    queued = submitted(replace(spec, queue="team", output=spec.output + "-q"))[0]
    assert (status(queued).state, status(queued).word) == ("waiting", "Suspended")


@pytest.mark.parametrize(
    ("pod", "events", "id_", "words"),
    [
        (
            {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
             "message": "0/9 nodes are available: 9 node(s) didn't match Pod's node affinity/selector."}]},
            [],
            "k8s-no-fitting-node",
            "Unschedulable",
        ),
        (
            {"phase": "Pending"},
            [{"type": "Warning", "reason": "FailedScheduling",
              "message": "0/9 nodes are available: 9 Insufficient nvidia.com/gpu."}],
            "k8s-no-gpu-capacity",
            "",
        ),
        (
            {"phase": "Pending", "containerStatuses": [{"name": "job", "state": {"waiting": {
             "reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry.example/train"'}}}]},
            [],
            "image-pull",
            "ImagePullBackOff",
        ),
        (
            {"phase": "Pending", "containerStatuses": [{"name": "job", "state": {"waiting": {
             "reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}}}]},
            [],
            "k8s-config",
            'secret "hub" not found',
        ),
    ],
)  # fmt: skip
def test_what_waiting_waits_for(
    cluster: Cluster, spec: JobSpec, pod: dict[str, Any], events: list[dict[str, Any]], id_: str, words: str
) -> None:
    record, _ = submitted(spec)
    made = cluster.pod(record.job_id or "", node="", **pod)
    cluster.events = [
        {"involvedObject": {"kind": "Pod", "name": made}, "metadata": {"name": "e"}, **row} for row in events
    ]
    state = status(record)
    assert state.state == "waiting" and words in state.reason
    assert found_in(accounting(record))[0] == id_


@pytest.mark.parametrize(
    ("job", "pod", "state", "code", "id_"),
    [
        ("BackoffLimitExceeded", failed(137, reason="OOMKilled"), "failed", 137, "host-oom-kill"),
        ("DeadlineExceeded", failed(143), "timeout", 143, "time-limit"),
        (
            "PodFailurePolicy",
            failed(86, message="preflight gpu-1: refused: driver 470.57.02 is older than 525.60.13. fix: another node"),
            "failed",
            86,
            "preflight-refused",
        ),
        (
            "BackoffLimitExceeded",
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
            "failed",
            None,
            "host-oom-kill",
        ),
        (
            "BackoffLimitExceeded",
            {**failed(137), "conditions": [{"type": "DisruptionTarget", "status": "True",
             "reason": "PreemptionByScheduler", "message": "default-scheduler: preempting to accommodate a higher"}]},
            "failed",
            137,
            "preempted",
        ),
    ],
)  # fmt: skip
def test_how_it_ended(
    cluster: Cluster, spec: JobSpec, job: str, pod: dict[str, Any], state: str, code: int | None, id_: str
) -> None:
    record, _ = submitted(spec)
    cluster.pod(record.job_id or "", 0, **pod)
    cluster.job(record.job_id or "")["status"] = {
        "failed": 1, "conditions": [{"type": "Failed", "status": "True", "reason": job, "message": f"{job} it is"}],
    }  # fmt: skip
    found = status(record)
    assert (found.state, found.exit_code, found.word) == (state, code, job)
    assert found_in(accounting(record))[0] == id_
    if code == 86:
        assert "driver 470.57.02 is older" in found.reason
        (refused,) = preflights(record)
        assert refused["node"] == "gpu-1" and refused["cause"]["fix"] == "another node"


def test_logs_by_rank_and_of_every_start(cluster: Cluster, spec: JobSpec) -> None:
    record, _ = submitted(spec)
    name = record.job_id or ""
    for index, text in ((0, b"zero\n"), (1, b"first try\n"), (1, b"second try\n"), (2, b"")):
        pod = cluster.pod(name, index, phase="Running")
        if text:
            cluster.logs[pod] = text
    paths = log_files(record)
    assert [path.read_bytes() for path in paths] == [b"zero\n", b"first try\n", b"second try\n"]
    assert [path.stem.rpartition("rank")[2] for path in paths] == ["0", "1", "1"]


def test_receipts_come_home_by_the_log(cluster: Cluster, spec: JobSpec) -> None:
    proof = replace(spec, command=(), verify=True)
    record, _ = submitted(proof)
    receipt = json.dumps({"schema": 1, "passed": True, "image_digest": "sha256:1"}, indent=1)
    cluster.logs[cluster.pod(record.job_id or "", 0, node="gpu-5")] = (
        f"report\n{RECEIPT_BEGIN}\n{receipt}\n\n{RECEIPT_END}\n".encode()
    )
    cluster.logs[cluster.pod(record.job_id or "", 1, node="gpu-6")] = f"died\n{RECEIPT_BEGIN}\n{{".encode()
    log_files(record)
    from envforge.jobs.follow import receipts

    assert [(node, row["image_digest"]) for node, row in receipts(record)] == [("gpu-5", "sha256:1")]
    assert (Path(record.output) / "receipt-gpu-5.json").is_file()


def test_status_and_collect_fetch_the_receipt_of_an_ended_proof(
    cluster: Cluster, spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    record, _ = submitted(replace(spec, nodes=1, command=(), verify=True))
    name, text = record.job_id or "", (RECEIPTS / "no-torch.json").read_text()
    pod = cluster.pod(name, 0, node="gpu-5", **failed(1))
    cluster.logs[pod] = f"report\n{RECEIPT_BEGIN}\n{text}\n{RECEIPT_END}\n".encode()
    conditions = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
    cluster.job(name)["status"] = {"conditions": conditions}
    for words in (["status", record.output], ["collect", record.output]):
        for path in Path(record.output).glob("receipt-*"):
            path.unlink()
        with pytest.raises(SystemExit):
            main(["job", *words])
        told = capsys.readouterr().out
        assert "python-package-missing" in told and "gpu-5" in told, told


def test_cancel_keeps_what_was_said(cluster: Cluster, spec: JobSpec) -> None:
    record, _ = submitted(spec)
    cluster.logs[cluster.pod(record.job_id or "", phase="Running")] = b"step 1\n"
    cancel(record)
    assert not [key for key in cluster.objects if key[0] == "jobs"]
    kept = read_record(Path(record.output))
    assert kept is not None and status(kept).state == "cancelled"
    assert any(path.read_bytes() == b"step 1\n" for path in Path(record.output).glob("*.log"))
    assert "phase Running" in accounting(kept)
    cancel(kept)  # once more is no failure
    assert follower(find_record("train", Path(record.output).parent)).status(kept).state == "cancelled"


def test_lost_and_never_submitted(cluster: Cluster, spec: JobSpec) -> None:
    record, _ = submitted(spec)
    cluster.objects.clear()
    assert status(record).state == "lost"
    assert status(replace(record, job_id=None)).state == "lost"


def test_command_line_from_submit_to_end(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["job", *words])
        out = capsys.readouterr().out
        return int(stopped.value.code or 0), out

    words = ("kubernetes", IMAGE, "--gpus", "0", "--name", "demo", "--submit", "--json", "--", "python", "t.py")
    code, out = run(*words)
    jsonschema.validate(json.loads(out), SCHEMA)
    answer = json.loads(out)["jobs"][0]
    assert code == 0 and answer["new"] is True
    assert json.loads(run(*words)[1])["jobs"][0] == answer | {"new": False}
    pod = cluster.pod(answer["job_id"], 0, phase="Running")
    cluster.logs[pod] = b"hello from the pod\n"
    state = json.loads(run("status", "demo", "--json")[1])
    jsonschema.validate(state, SCHEMA)
    assert state["state"] == "running"
    assert run("logs", "demo") == (0, "hello from the pod\n")
    code, out = run("cancel", "demo", "--json")
    assert (code, json.loads(out)["state"]) == (0, "cancelled")
    assert run("status", "demo")[0] == 1


def test_file_of_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("job.yaml", "job.json"):
        with pytest.raises(SystemExit) as stopped:
            main(["job", "kubernetes", IMAGE, "--gpus", "1", "-o", name, "--", "python", "$(id)"])
        assert not stopped.value.code and capsys.readouterr().out.strip() == name
    import yaml

    (from_yaml,) = yaml.safe_load_all((tmp_path / "job.yaml").read_text())
    assert json.loads((tmp_path / "job.json").read_text())["items"] == [from_yaml]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "job.yaml"]


def test_fleet_gives_each_image_its_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes as kubectl lists them; images by project folders, with the plan of each."""
    from envforge.resolver.plan import Plan, Target

    monkeypatch.chdir(tmp_path)
    nodes = []
    for name, product, major, minor, driver in (
        ("a-1", "NVIDIA-A100-SXM4-80GB", "8", "0", "550.54.15"),
        ("h-1", "NVIDIA-H100-80GB-HBM3", "9", "0", "550.54.15"),
        ("v-1", "Tesla-V100-SXM2-32GB", "7", "0", "470.57.02"),
    ):
        marks = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.count": "8", "nvidia.com/gpu.compute.major": major,
                 "nvidia.com/gpu.compute.minor": minor, "nvidia.com/cuda.driver-version.full": driver,
                 "kubernetes.io/arch": "amd64"}  # fmt: skip
        nodes.append({"kind": "Node", "metadata": {"name": name, "labels": marks}, "status": {"capacity": {}}})
    (tmp_path / "nodes.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes}))
    for name, sm in (("old", "8.0"), ("new", "9.0")):
        folder = tmp_path / name
        folder.mkdir()
        target = Target("x86_64", None, "550.54.15", "525.60.13", (sm,))
        (folder / "plan.json").write_text(Plan("3.11", "cu126", "native", {}, (), target, cuda="12.6").dumps())
        data = {"engine": "docker", "address": "a" * 64, "reference": f"registry.example/{name}:1", "digest": None}
        (folder / "build.json").write_text(json.dumps(data))
    with pytest.raises(SystemExit) as stopped:
        main(["job", "kubernetes", "old", "new", "--fleet", "nodes.json", "--json", "--", "python", "t.py"])
    said = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 1  # a node is left out
    assert [(job["hosts"], job["image"]) for job in said["jobs"]] == [
        (["a-1"], "registry.example/old:1"), (["h-1"], "registry.example/new:1"),
    ]  # fmt: skip
    ((host, reason),) = [(row["host"], row["reason"]) for row in said["uncovered"]]
    assert host == "v-1" and "470.57.02 is older than 525.60.13" in reason
    for job, name in zip(said["jobs"], ("a-1", "h-1"), strict=True):
        (item,) = job["manifests"]
        affinity = item["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
        for term in affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]:
            assert {"key": "kubernetes.io/hostname", "operator": "In", "values": [name]} in term["matchExpressions"]
