"""A job -> Kubernetes objects: a Job, and for several nodes a headless Service. Pure: plain data in, plain data out.

Words of users stand in lists and values only, never in a shell's text. Kubernetes itself replaces `$(NAME)` in commands
and values, so every `$` of theirs is doubled (documentation: "Define Dependent Environment Variables").
"""

from __future__ import annotations

import json
import re
from typing import Any

from envforge.errors import DataError
from envforge.jobs.affinity import node_affinity
from envforge.jobs.model import (
    DIGEST_VARIABLE,
    ENTRYPOINT,
    PREFLIGHT_EXIT,
    JobSpec,
    Pod,
    check,
    proof_words,
    torchrun_words,
)

Manifest = dict[str, Any]
CONTAINER = "job"
CACHE = "/opt/envforge/cache"
PORT = 29_500  # every pod has its own network: no two jobs meet here
LABEL = "envforge/job"
KEY = "envforge/key"
MAX_RETRIES = 50
SHM_MIB = 16_384  # a cap, not a reservation; it counts against the memory limit
RECEIPT_BEGIN, RECEIPT_END = "envforge-receipt-begin", "envforge-receipt-end"
GPU = "nvidia.com/gpu"

# Constant: the user's words arrive as positional parameters. The preflight refuses with 86 before anything else runs.
START = '"$0" preflight $ENVFORGE_PREFLIGHT_OPTIONS && ENVFORGE_PREFLIGHT=done exec "$0" "$@"'
# A proof's receipt has no shared folder to go to: it stands at the end of the log, between two marks.
START_PROOF = f"""\
"$0" preflight $ENVFORGE_PREFLIGHT_OPTIONS || exit $?
"$0" "$@" --json=/tmp/receipt.json &
proof=$!
trap 'kill -TERM "$proof" 2>/dev/null' TERM INT
code=0
wait "$proof" || code=$?
if kill -0 "$proof" 2>/dev/null; then code=0; wait "$proof" || code=$?; fi
if [ -f /tmp/receipt.json ]; then echo {RECEIPT_BEGIN}; cat /tmp/receipt.json; echo; echo {RECEIPT_END}; fi
exit "$code"
"""

_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DNS_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_LABEL_KEY = re.compile(rf"(?:{_DNS_NAME.pattern}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
_SECRET = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<secret>[^/=]+)(?:/(?P<key>[-._A-Za-z0-9]{1,253}))?")
_TOLERATION = re.compile(
    r"(?P<key>[^=:]+)(?:=(?P<value>[^:]*))?(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)


def job_name(spec: JobSpec) -> str:
    """The name in the cluster: the job's own and enough of its key that the same job always has the same one.

    Pods of an indexed job are hosts named NAME-INDEX: both together are a DNS label. A Service begins with a letter.
    """
    tail = f"-{spec.key()[:8]}"
    room = 63 - len(tail) - len(f"-{spec.nodes - 1}")
    head = spec.name if spec.name[:1].isalpha() else f"j-{spec.name}"
    return head[:room].rstrip("-") + tail


def literal(text: str) -> str:
    """A word that Kubernetes leaves as it is."""
    return text.replace("$", "$$")


def manifests(spec: JobSpec) -> list[Manifest]:
    """The objects in the order in which they are created.

    Raises:
        DataError: every fault of the job at once, also what Kubernetes cannot carry and what would write a secret down.
    """
    check(spec)
    pod = spec.pod or Pod()
    faults = _faults(spec, pod)
    if faults:
        raise DataError(
            "this job cannot be made for Kubernetes:\n" + "\n".join(f"  - {fault}" for fault in faults),
            "correct what is named above",
        )
    meta = _metadata(spec)
    found = [_job(spec, pod, meta)]
    return [*found, _service(meta)] if spec.nodes > 1 else found


def dump(objects: list[Manifest], as_json: bool = False) -> str:
    """Text for kubectl apply -f: YAML documents, or a JSON List."""
    if as_json:
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1) + "\n"
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        # Other readers of YAML take more words for numbers and dates than this writer: quote what is not plain.
        plain = re.fullmatch(r"[A-Za-z/][A-Za-z/ ._-]*[A-Za-z]", value) and value.lower() not in _YAML_WORDS
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')

    Dumper.add_representer(str, text)
    return "".join(
        yaml.dump(item, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=2**31 - 1, explicit_start=True)
        for item in objects
    )


_YAML_WORDS = frozenset({"yes", "no", "on", "off", "y", "n", "true", "false", "null", "nan", "inf"})


# --- the objects ---------------------------------------------------------------------------------------------------


def _metadata(spec: JobSpec) -> Manifest:
    name = job_name(spec)
    labels = {"app.kubernetes.io/managed-by": "envforge", LABEL: name}
    notes = {KEY: spec.key(), "envforge/name": spec.name}
    if spec.digest:
        notes["envforge/image-digest"] = spec.digest
    plan = spec.to_json()["plan"]
    if plan:
        notes["envforge/plan"] = plan
    where = {"namespace": spec.namespace} if spec.namespace else {}
    return {"name": name, **where, "labels": labels, "annotations": notes}


def _service(meta: Manifest) -> Manifest:
    """Gives every pod a name that the others can look up, from the start on: ranks meet before any is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL: meta["name"]},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(spec: JobSpec, pod: Pod, meta: Manifest) -> Manifest:
    alone = spec.verify and spec.nodes > 1  # proofs do not need each other: one bad node must not end the others'
    refused = {"containerName": CONTAINER, "operator": "In", "values": [PREFLIGHT_EXIT]}
    job: Manifest = {
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "completionMode": "Indexed" if spec.nodes > 1 else "NonIndexed",
        "ttlSecondsAfterFinished": pod.keep_seconds,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailIndex" if alone else "FailJob", "onExitCodes": refused},
            ]
        },
    }
    if alone:
        job |= {"backoffLimitPerIndex": pod.retries, "maxFailedIndexes": spec.nodes}
    else:
        job["backoffLimit"] = MAX_RETRIES if spec.requeue else pod.retries * spec.nodes
    if spec.time_minutes and not spec.requeue:
        job["activeDeadlineSeconds"] = max(spec.time_minutes * 60 - spec.signal_seconds, 1)
    if spec.queue:
        meta = {**meta, "labels": {**meta["labels"], "kueue.x-k8s.io/queue-name": spec.queue}}
        job["suspend"] = True  # Kueue lets it go when there is room
    labels = {"app.kubernetes.io/managed-by": "envforge", LABEL: meta["name"]}
    job["template"] = {"metadata": {"labels": labels}, "spec": _pod(spec, pod, meta["name"])}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": job}


def _pod(spec: JobSpec, pod: Pod, name: str) -> Manifest:
    volumes, mounts = _volumes(spec, pod)
    user = {"runAsUser": pod.user} if pod.user is not None else {}
    # fsGroup 0: the image's own folders and new volumes belong to group 0, so that any uid can write them.
    security = {
        "runAsNonRoot": True, **user, "fsGroup": 0, "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    found: Manifest = {
        "restartPolicy": "Never",  # a failure policy needs it
        "terminationGracePeriodSeconds": max(spec.signal_seconds, 30),
        "enableServiceLinks": False,  # other services' variables have no business in a job
        "automountServiceAccountToken": spec.service_account is not None,
        "securityContext": security,
        "containers": [_container(spec, pod, mounts, _env(spec, name))],
        "volumes": volumes,
    }
    if spec.nodes > 1:
        found["subdomain"] = name
    if spec.requeue and spec.time_minutes:
        # The pod's own limit: the job goes on with a new pod, from the checkpoint.
        found["activeDeadlineSeconds"] = max(spec.time_minutes * 60 - spec.signal_seconds, 1)
    affinity = node_affinity(spec)
    spread = {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": {LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
        ]
    }
    found["affinity"] = {
        **({"nodeAffinity": affinity} if affinity else {}),
        **({"podAntiAffinity": spread} if spec.nodes > 1 else {}),
    }
    tolerations = [_toleration(word) for word in pod.tolerations]
    if spec.gpus_per_node:
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    more = {
        "tolerations": tolerations,
        "nodeSelector": dict(pod.labels),
        "imagePullSecrets": [{"name": secret} for secret in pod.pull_secrets],
        "serviceAccountName": spec.service_account,
        "priorityClassName": pod.priority_class,
        "runtimeClassName": pod.runtime_class,
    }
    return {key: value for key, value in {**found, **more}.items() if value not in (None, [], {})}


def _container(spec: JobSpec, pod: Pod, mounts: list[Manifest], env: list[Manifest]) -> Manifest:
    command = list(spec.command)
    if spec.verify:
        command = proof_words(spec)
    words = [literal(word) for word in command]
    if spec.torchrun:
        words[1:1] = torchrun_words(spec, "$(NODE_RANK)", "$(MASTER_ADDR)", "$(MASTER_PORT)")
    more: Manifest = {"workingDir": spec.workdir} if spec.workdir else {}
    sources = [{"secretRef": {"name": name}} for name in spec.secrets if "=" not in name]
    if sources:
        more["envFrom"] = sources
    limits: dict[str, str] = dict(pod.resources)
    if spec.gpus_per_node:
        limits[pod.gpu_resource] = str(spec.gpus_per_node)
    if spec.memory_mib:
        limits["memory"] = f"{spec.memory_mib}Mi"
    if spec.cpus_per_task:
        limits["cpu"] = str(spec.cpus_per_task)
    return {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", literal(START_PROOF if spec.verify else START), ENTRYPOINT],
        "args": words,
        **more,
        "env": env,
        "resources": {"requests": limits, "limits": dict(limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": not pod.writable_root,
        },
        # The last lines of a failed pod stand in its status: a refused node says why without its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _env(spec: JobSpec, job: str) -> list[Manifest]:
    options = [f"--nodes={spec.nodes}"]
    options += [f"--gpus={spec.gpus_per_node}", "--own"] if spec.gpus_per_node else []
    options += [f"--address={spec.address}"] if spec.address else []
    own = {
        "ENVFORGE_JOB": "kubernetes",
        "ENVFORGE_PREFLIGHT_OPTIONS": " ".join(options),
        "HOME": "/tmp",
        "WORLD_SIZE": str(spec.nodes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": f"{job}-0.{job}" if spec.nodes > 1 else "127.0.0.1",
        "MASTER_PORT": str(PORT),
    }
    if spec.digest:
        own[DIGEST_VARIABLE] = spec.digest
    rows: list[Manifest] = [{"name": "ENVFORGE_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    for name in ("NODE_RANK", "RANK"):
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        place: Manifest = {"valueFrom": {"fieldRef": {"fieldPath": index}}} if spec.nodes > 1 else {"value": "0"}
        rows.append({"name": name, **place})
    rows += [{"name": name, "value": value} for name, value in own.items() if name not in spec.env]
    rows = [row for row in rows if row["name"] not in spec.env]
    rows += [{"name": name, "value": literal(value)} for name, value in sorted(spec.env.items())]
    for word in spec.secrets:
        found = _SECRET.fullmatch(word)
        if found and found["name"]:
            source = {"name": found["secret"], "key": found["key"] or found["name"]}
            rows.append({"name": found["name"], "valueFrom": {"secretKeyRef": source}})
    return rows


def _volumes(spec: JobSpec, pod: Pod) -> tuple[list[Manifest], list[Manifest]]:
    shm = pod.shm_mib or min(SHM_MIB, max((spec.memory_mib or 2 * SHM_MIB) // 2, 64))
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm}Mi"}}]
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    taken = {path.rstrip("/") for path in (*(c.target for c in spec.claims), *(m.target for m in spec.mounts))}
    for name, path in (("tmp", "/tmp"), ("cache", CACHE)):
        if path not in taken:
            volumes.append({"name": name, "emptyDir": {}})
            mounts.append({"name": name, "mountPath": path})
    for number, claim in enumerate(spec.claims):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim.name}})
        mounts.append({"name": f"claim-{number}", "mountPath": claim.target, "readOnly": claim.read_only})
    for number, mount in enumerate(spec.mounts):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": mount.source, "type": "Directory"}})
        mounts.append({"name": f"host-{number}", "mountPath": mount.target, "readOnly": mount.read_only})
    return volumes, mounts


def _toleration(word: str) -> Manifest:
    found = _TOLERATION.fullmatch(word)
    assert found is not None, "checked before"
    value = {"operator": "Exists"} if found["value"] is None else {"operator": "Equal", "value": found["value"]}
    return {"key": found["key"], **value, **({"effect": found["effect"]} if found["effect"] else {})}


# --- faults --------------------------------------------------------------------------------------------------------


def _faults(spec: JobSpec, pod: Pod) -> list[str]:
    faults = []
    if not spec.image:
        faults.append("image: Kubernetes pulls images by their reference; push it first (envforge build --push)")
    if spec.tasks_per_node != 1:
        faults.append("tasks per node: a pod is one task; torchrun starts the processes of a node (--nproc-per-node)")
    for what, value, shape in (
        ("namespace", spec.namespace, _DNS_LABEL),
        ("queue", spec.queue, _DNS_NAME),
        ("service account", spec.service_account, _DNS_NAME),
        ("priority class", pod.priority_class, _DNS_NAME),
        ("runtime class", pod.runtime_class, _DNS_NAME),
        *(("claim", claim.name, _DNS_NAME) for claim in spec.claims),
        *(("pull secret", name, _DNS_NAME) for name in pod.pull_secrets),
        *(("node", name, _LABEL_VALUE) for name in [*spec.exclude, *(spec.nodelist or "").split(",")]),
        *(("label", name, _LABEL_KEY) for name in pod.labels),
        *((f"label {name}", value, _LABEL_VALUE) for name, value in pod.labels.items()),
        *(("resource", name, _LABEL_KEY) for name in [*pod.resources, pod.gpu_resource]),
        *((f"resource {name}", n, re.compile(r"\d{1,9}([KMGT]i?|m)?")) for name, n in pod.resources.items()),
        *(("toleration", word, _TOLERATION) for word in pod.tolerations),
    ):
        if value is not None and not shape.fullmatch(value):
            faults.append(f"{what} {value[:60]!r}: Kubernetes has no such names")
    for word in spec.secrets:
        found = _SECRET.fullmatch(word)
        if not found or not _DNS_NAME.fullmatch(found["secret"]) or (found["key"] and not found["name"]):
            faults.append(f"secret {word[:60]!r}: give it as NAME=SECRET/KEY, or as the name of a Secret")
    targets = [*(c.target for c in spec.claims), *(m.target for m in spec.mounts)]
    for target in targets:
        if not target.startswith("/") or ":" in target:
            faults.append(f"mount {target[:80]!r}: an absolute path without a colon is needed")
    if len({target.rstrip("/") for target in targets}) != len(targets):
        faults.append("mounts: two stand at the same place")
    if pod.user == 0:
        faults.append("user: 0 is root; any other number works with an image of envforge")
    return faults
