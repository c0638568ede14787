"""Manifests: valid for the schemas of three Kubernetes versions, safe, placed by the plan, hostile words unharmed."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from envforge.errors import DataError
from envforge.jobs.affinity import node_affinity
from envforge.jobs.manifest import CONTAINER, RECEIPT_BEGIN, RECEIPT_END, START, START_PROOF, dump, job_name, manifests
from envforge.jobs.model import Claim, JobSpec, Mount, Pod

DIGEST = "sha256:" + "ab" * 32
VERSIONS = ("1.29", "1.33", "1.37")
ONE = JobSpec(
    "train",
    image=f"registry.example/train@{DIGEST}",
    command=("python", "train.py", "--lr", "2e-4"),
    gpus_per_node=2,
    memory_mib=64_000,
    cpus_per_task=8,
    time_minutes=60,
    variant="cu126",
    driver_floor="525.60.13",
    sms=("8.0", "8.6", "9.0"),
    plan={"target": {"arch": "x86_64"}},
    output="/srv/jobs/train",
)
TWO = replace(ONE, nodes=2, command=("torchrun", "train.py"), queue="team-a", namespace="ml", service_account="trainer",
              secrets=("HF_TOKEN=hub/token", "wandb"), claims=(Claim("hf", "/opt/envforge/cache/hf"),),
              mounts=(Mount("/data", "/data"),), env={"EPOCHS": "3"}, workdir="/workspace/run", exclude=("gpu-7",),
              pod=Pod(tolerations=("a=ml:NoSchedule", "spot"), labels={"zone": "a"}, pull_secrets=("regcred",),
                      priority_class="low", runtime_class="nvidia", user=9, resources={"rdma/hca": "1"}),)  # fmt: skip
PROOFS = replace(ONE, nodes=3, command=(), verify=True)


def job_of(spec: JobSpec) -> dict[str, Any]:
    return next(item for item in manifests(spec) if item["kind"] == "Job")


def container_of(spec: JobSpec) -> dict[str, Any]:
    return job_of(spec)["spec"]["template"]["spec"]["containers"][0]


def env_of(spec: JobSpec) -> dict[str, Any]:
    return {row["name"]: row for row in container_of(spec)["env"]}


def expanded(text: str, values: dict[str, str]) -> str:
    """What a kubelet makes of a command's word or a value: $(NAME) where NAME is known, $$ -> $ (documentation)."""
    return re.sub(
        r"\$\$|\$\(([^()$]+)\)",
        lambda m: "$" if m[0] == "$$" else values.get(m[1], m[0]),
        text,
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("spec", [ONE, TWO, PROOFS, replace(ONE, requeue=True), replace(ONE, gpus_per_node=0)])
def test_valid_for_the_official_schemas(spec: JobSpec, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for item in manifests(spec):
        validate.validate(item, version, strict=True)


def test_schemas_can_say_no() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    broken = job_of(ONE)
    broken["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"] = {"type": "DisruptionTarget"}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, VERSIONS[0], strict=True)


def test_yaml_and_json_are_what_was_made() -> None:
    assert list(yaml.safe_load_all(dump(manifests(TWO)))) == manifests(TWO)
    assert json.loads(dump(manifests(TWO), as_json=True))["items"] == manifests(TWO)
    assert dump(manifests(TWO)) == dump(manifests(TWO))


def test_non_root_and_sealed() -> None:
    pod = job_of(ONE)["spec"]["template"]["spec"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True, "fsGroup": 0, "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    own = container_of(ONE)["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
    }  # fmt: skip
    assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
    places = {row["mountPath"]: row["name"] for row in container_of(ONE)["volumeMounts"]}
    volumes = {row["name"]: row for row in pod["volumes"]}
    assert volumes[places["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16384Mi"}
    assert volumes[places["/tmp"]] and volumes[places["/opt/envforge/cache"]]
    small = replace(ONE, memory_mib=4096)
    assert job_of(small)["spec"]["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] == "2048Mi"


def test_what_is_asked_for() -> None:
    assert container_of(ONE)["resources"]["limits"] == {"nvidia.com/gpu": "2", "memory": "64000Mi", "cpu": "8"}
    mig = replace(ONE, pod=Pod(gpu_resource="nvidia.com/mig-3g.40gb"))
    assert container_of(mig)["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "2"
    job = job_of(ONE)["spec"]
    assert job["activeDeadlineSeconds"] == 60 * 60 - 120 and job["backoffLimit"] == 0
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    again = job_of(replace(ONE, requeue=True))["spec"]
    assert "activeDeadlineSeconds" not in again and again["backoffLimit"] > 1
    assert again["template"]["spec"]["activeDeadlineSeconds"] == 60 * 60 - 120


def test_refused_nodes_and_disruptions_are_told_from_failures() -> None:
    rules = job_of(ONE)["spec"]["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert rules[1]["action"] == "FailJob" and rules[1]["onExitCodes"]["values"] == [86]
    proofs = job_of(PROOFS)["spec"]
    assert proofs["podFailurePolicy"]["rules"][1]["action"] == "FailIndex"
    assert proofs["backoffLimitPerIndex"] == 0 and proofs["maxFailedIndexes"] == 3 and "backoffLimit" not in proofs


def test_several_nodes_meet() -> None:
    job, service = manifests(TWO)
    name = job_name(TWO)
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == name
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == 2
    env = env_of(TWO)
    assert env["MASTER_ADDR"]["value"] == f"{name}-0.{name}" and env["WORLD_SIZE"]["value"] == "2"
    values = {"NODE_RANK": "1", "MASTER_ADDR": env["MASTER_ADDR"]["value"], "MASTER_PORT": "29500"}
    assert [expanded(word, values) for word in container_of(TWO)["args"]] == [
        "torchrun", "--nnodes=2", "--node-rank=1", f"--master-addr={name}-0.{name}", "--master-port=29500",
        "--nproc-per-node=2", "train.py",
    ]  # fmt: skip
    spread = job["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    assert spread["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"] == "kubernetes.io/hostname"
    for text in (name, f"{'x' * 53}"):
        longest = job_name(replace(TWO, name=text[:53].rstrip("-"), nodes=10_000))
        assert len(f"{longest}-9999") <= 63
    assert job_name(replace(TWO, name="7b-run"))[0].isalpha()


def test_kueue_decides_when() -> None:
    job = job_of(TWO)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a" and job["spec"]["suspend"] is True
    assert "suspend" not in job_of(ONE)["spec"]


# --- where it may run ----------------------------------------------------------------------------------------------


def fits(affinity: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    """The scheduler's rule: any term, of it every expression; Gt compares whole numbers."""
    if affinity is None:
        return True

    def holds(row: dict[str, Any]) -> bool:
        value = labels.get(row["key"])
        if row["operator"] == "NotIn":
            return value not in row["values"]
        if value is None:
            return False
        if row["operator"] == "Gt":
            return int(value) > int(row["values"][0])
        return row["operator"] == "Exists" or value in row["values"]

    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return any(all(holds(row) for row in term["matchExpressions"]) for term in terms)


def labels(driver: str, sm: str, arch: str = "amd64", host: str = "gpu-1") -> dict[str, str]:
    parts = dict(zip(("major", "minor", "rev"), driver.split("."), strict=False))
    found = {f"nvidia.com/cuda.driver.{name}": value for name, value in parts.items()}
    major, minor = sm.split(".")
    return found | {
        "nvidia.com/gpu.compute.major": major, "nvidia.com/gpu.compute.minor": minor, "kubernetes.io/arch": arch,
        "kubernetes.io/hostname": host,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("driver", "sm", "arch", "expected"),
    [
        ("525.60.13", "8.0", "amd64", True),
        ("525.60.12", "8.0", "amd64", False),
        ("525.59.99", "8.0", "amd64", False),
        ("525.85.12", "8.0", "amd64", True),
        ("524.99.99", "8.0", "amd64", False),
        ("550.54.15", "9.0", "amd64", True),
        ("1000.5", "8.9", "amd64", True),  # a later minor of a planned major; and numbers, not texts, are compared
        ("550.54.15", "7.0", "amd64", False),
        ("550.54.15", "12.0", "amd64", False),
        ("550.54.15", "9.0", "arm64", False),
    ],
)
def test_plan_becomes_node_conditions(driver: str, sm: str, arch: str, expected: bool) -> None:
    assert fits(node_affinity(ONE), labels(driver, sm, arch)) is expected


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.integers(400, 700), st.integers(0, 120), st.integers(0, 99)),
    st.tuples(st.integers(400, 700), st.integers(0, 120), st.integers(0, 99)),
)
def test_driver_conditions_are_at_least_the_floor(floor: tuple[int, int, int], have: tuple[int, int, int]) -> None:
    def text(version: tuple[int, int, int]) -> str:
        return f"{version[0]}.{version[1]:02d}.{version[2]:02d}"

    spec = replace(ONE, driver_floor=text(floor))
    assert fits(node_affinity(spec), labels(text(have), "8.0")) is (have >= floor)


def test_nodes_by_name() -> None:
    spec = replace(ONE, nodelist="gpu-1,gpu-2", exclude=("gpu-2",))
    assert fits(node_affinity(spec), labels("550.54.15", "9.0", host="gpu-1"))
    assert not fits(node_affinity(spec), labels("550.54.15", "9.0", host="gpu-2"))
    assert not fits(node_affinity(spec), labels("550.54.15", "9.0", host="gpu-3"))
    cpu = replace(ONE, gpus_per_node=0, variant="cpu", plan=None)
    assert node_affinity(cpu) is None


# --- hostile words and secrets -------------------------------------------------------------------------------------

HOSTILE = ("$(touch /tmp/x)", "$(NODE_RANK)", "$$(HOME)", "$$$", "`id`", "a'b\"c", "-n", "two\nlines", "\ttab ",
           "%s\\n", "; rm -rf /", "yes", "1e3", "0x1F", "12:30:45", "null", "~", "# no", "- a: b", "{{x}}",
           "é\u2028\x85", "", "*", "&a", "!!python/object:os.system", "<<", "2026-11-02")  # fmt: skip


def test_hostile_words_arrive_unharmed(tmp_path: Path) -> None:
    """Through YAML, the kubelet's expansion and the real shell's positional parameters."""
    spec = replace(ONE, command=("python", *HOSTILE), env={f"V{n}": word for n, word in enumerate(HOSTILE)})
    for text in (dump(manifests(spec)), dump(manifests(spec), as_json=True)):
        loaded = list(yaml.safe_load_all(text))
        job = loaded[0]["items"][0] if loaded[0]["kind"] == "List" else loaded[0]
        container = job["spec"]["template"]["spec"]["containers"][0]
        known = {row["name"]: row.get("value", "1") for row in container["env"]}
        known = {name: expanded(value, {}) for name, value in known.items()}
        assert [known[f"V{n}"] for n in range(len(HOSTILE))] == list(HOSTILE)
        entry = tmp_path / "entry"
        entry.write_text('#!/bin/sh\n[ "$1" = preflight ] && exit 0\nfor word do printf "%s\\0" "$word"; done\n')
        entry.chmod(0o755)
        command = [expanded(word, known) for word in container["command"]]
        assert command[:3] == ["/bin/sh", "-c", START]
        argv = [*command[:3], str(entry), *(expanded(word, known) for word in container["args"])]
        done = subprocess.run(argv, capture_output=True, env={"PATH": "/usr/bin:/bin", **known})
        assert done.stdout.decode().split("\0")[:-1] == ["python", *HOSTILE]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))), max_size=4))
def test_any_text_survives_yaml_and_expansion(words: list[str]) -> None:
    spec = replace(ONE, command=("python", *words))
    (job,) = yaml.safe_load_all(dump(manifests(spec)))
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [expanded(word, {"HOME": "no"}) for word in args] == ["python", *words]


def test_refused_node_never_starts_the_command(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    entry.write_text(f'#!/bin/sh\n[ "$1" = preflight ] && exit 86\ntouch {tmp_path}/started\n')
    entry.chmod(0o755)
    assert subprocess.run(["/bin/sh", "-c", START, str(entry), "python"]).returncode == 86
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(("refused", "code"), [(0, 1), (86, 86)])
def test_proof_prints_its_receipt_and_keeps_its_exit_code(tmp_path: Path, refused: int, code: int) -> None:
    entry = tmp_path / "entry"
    entry.write_text(
        f'#!/bin/sh\n[ "$1" = preflight ] && exit {refused}\n'
        'for word do case $word in --json=*) echo "{\\"passed\\": false}" > "${word#--json=}" ;; esac; done\n'
        'echo "report of $2"; exit 1\n'
    )
    entry.chmod(0o755)
    script = START_PROOF.replace("/tmp/receipt.json", str(tmp_path / "receipt.json"))
    words = ["/bin/sh", "-c", script, str(entry), "verify", "two words"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == code
    if not refused:
        assert done.stdout.startswith("report of two words\n")
        body = done.stdout.partition(f"\n{RECEIPT_BEGIN}\n")[2].partition(f"\n{RECEIPT_END}")[0]
        assert json.loads(body) == {"passed": False}
    container = container_of(PROOFS)
    assert expanded(container["command"][2], {}) == START_PROOF and container["args"] == ["verify", "--grade=full"]
    static = container_of(replace(PROOFS, command=("--grade", "static")))
    assert static["args"] == ["verify", "--grade", "static"], "the user's own word on the grade stays"


def test_secrets_go_by_name_only() -> None:
    rows = env_of(TWO)
    assert rows["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert container_of(TWO)["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    planted = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1"
    for change in (
        {"env": {"HF_TOKEN": "anything"}},
        {"env": {"NOTE": f"use {planted}"}},
        {"env": {"HTTPS_PROXY": "http://ada:pa55word@proxy:3128"}},
        {"env": {"WANDB_API_KEY": "0123456789"}},
        {"command": ("python", "push.py", f"--hub={planted}")},
        {"command": ("python", "push.py", "--password", "opensesame")},
        {"command": ("python", "push.py", "--api-key=opensesame")},
    ):
        with pytest.raises(DataError, match="secret"):
            manifests(replace(ONE, **change))
    fine = replace(
        ONE, command=("python", "t.py", "--eos_token", "</s>", "--max-tokens=512"), env={"MAX_TOKENS": "512"}
    )
    assert manifests(fine)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tasks_per_node": 2}, "a pod is one task"),
        ({"image": "", "image_file": "/srv/train.sif"}, "pulls images by their reference"),
        ({"namespace": "Team_A"}, "namespace"),
        ({"secrets": ("HF_TOKEN",)}, "NAME=SECRET/KEY"),
        ({"secrets": ("../x",)}, "NAME=SECRET/KEY"),
        ({"claims": (Claim("hf", "cache"),)}, "absolute path"),
        ({"claims": (Claim("a", "/data"), Claim("b", "/data/"))}, "same place"),
        ({"pod": Pod(user=0)}, "root"),
        ({"pod": Pod(tolerations=("a=b:Never:x",))}, "toleration"),
        ({"pod": Pod(labels={"zone": "a b"})}, "label zone"),
        ({"pod": Pod(resources={"rdma/hca": "many"})}, "resource"),
    ],
)
def test_faults_are_told(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        manifests(replace(ONE, **change))
    assert said in caught.value.cause


def test_container_is_named() -> None:
    assert container_of(ONE)["name"] == CONTAINER
    assert job_of(ONE)["metadata"]["annotations"]["envforge/image-digest"] == DIGEST
    assert env_of(ONE)["ENVFORGE_IMAGE_DIGEST"]["value"] == DIGEST
