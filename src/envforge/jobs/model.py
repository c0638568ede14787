"""What a job is, before any scheduler: one frozen value that every back end renders.

Words of users (names, paths, values) are checked for what no back end can carry (NUL, a name that is no name); all
else is the back end's to quote. Values of secrets are never held here: a job knows their names only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from envforge import words
from envforge.errors import DataError
from envforge.redact import looks_secret

PREFLIGHT_EXIT = 86  # the node was refused before user code ran
ENTRYPOINT = "/opt/envforge/bin/envforge-entrypoint"  # `preflight [OPTION...]`, `verify [OPTION...]` or a command
DIGEST_VARIABLE = "ENVFORGE_IMAGE_DIGEST"  # the image cannot know its own digest: the job tells it
RECEIPT = "receipt.json"
MAX_NODES = 10_000
BASE_PORT, PORTS = 20_000, 12_000  # below the kernel's own range of ephemeral ports (32768 and up)

# What of the submitting machine may reach the job. Nothing that changes which libraries or modules are loaded.
PASSED: tuple[str, ...] = ("TZ", "LANG", "LC_ALL", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
PASSED += tuple(name.lower() for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"))
LEAKS = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")

_REMARKS = ("reasons", "warnings", "matrix_hash", "matrix_as_of")  # of a plan: they change no byte of what runs
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,51}[a-z0-9])?")  # a DNS label: the narrowest of all back ends


class Mount(NamedTuple):
    """A folder of the node in the container. Both paths are absolute."""

    source: str
    target: str
    read_only: bool = True


class Claim(NamedTuple):
    """A volume claim of Kubernetes and where it stands in the container."""

    name: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """What only Kubernetes asks about a job.

    gpu_resource: the name under which nodes offer GPUs (a MIG profile has its own). shm_mib: cap of /dev/shm, None for
    one that fits the memory. retries: how often a failed node's pod is started again. keep_seconds: how long an ended
    job stays to be asked. user: numeric uid, None for the image's own. labels: node labels that must hold.
    tolerations: `KEY`, `KEY=VALUE`, each with `:EFFECT` or without. resources: further ones by name (rdma/hca).
    """

    gpu_resource: str = "nvidia.com/gpu"
    shm_mib: int | None = None
    retries: int = 0
    keep_seconds: int = 7 * 86_400
    user: int | None = None
    writable_root: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[str, ...] = ()
    resources: Mapping[str, str] = field(default_factory=dict)
    pull_secrets: tuple[str, ...] = ()
    priority_class: str | None = None
    runtime_class: str | None = None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job.

    image: reference, with `@sha256:...` where the digest is known. image_file: the same image as a file or folder that
    the cluster has (`images export`: .sqsh, .sif, an OCI bundle), or the prefix of an environment without container.
    command: argv as the user gave it; no shell reads it. With `verify` it may be empty.
    gpus_per_node, cpus_per_task, memory_mib (per node), time_minutes: what is asked of the scheduler; None and 0 say
    nothing to it. signal_seconds: so long before its end the job gets SIGTERM, to write a checkpoint; with `requeue`
    it then goes back to the queue. secrets: names of secrets (Slurm: variables of whoever submits; Kubernetes:
    `NAME=SECRET/KEY` or the name of a Secret). passed_variables: variables of the submitting machine that the job may
    see. plan: the plan's JSON. driver_floor, sms, variant: what the preflight holds the node against.
    output: folder that the nodes share and that logs, records and receipts go to. workdir: in the container, None for
    the image's own. address: content address of the image, which the preflight compares with what it finds.
    image_digest: `sha256:...` where the reference does not carry it (what the image was exported from).
    """

    name: str
    image: str = ""
    command: tuple[str, ...] = ()
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    memory_mib: int | None = None
    time_minutes: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    secrets: tuple[str, ...] = ()
    # Slurm
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    qos: str | None = None
    nodelist: str | None = None
    exclude: tuple[str, ...] = ()  # nodes that must not take part
    # Kubernetes
    namespace: str | None = None
    queue: str | None = None
    service_account: str | None = None
    claims: tuple[Claim, ...] = ()
    pod: Pod | None = None

    requeue: bool = False
    signal_seconds: int = 120
    verify: bool = False
    plan: Mapping[str, Any] | None = None
    variant: str | None = None
    driver_floor: str | None = None
    sms: tuple[str, ...] = ()
    passed_variables: tuple[str, ...] = PASSED
    output: str = ""
    workdir: str | None = None
    image_file: str | None = None
    address: str | None = None
    image_digest: str | None = None
    attempt: int = 0  # another one of the same job, asked for by name (--again)

    @property
    def digest(self) -> str | None:
        """`sha256:...` of the image, where it is known: what receipts are tied to."""
        return self.image_digest or self.image.partition("@")[2] or None

    @property
    def world(self) -> int:
        """Tasks in all."""
        return self.nodes * self.tasks_per_node

    @property
    def torchrun(self) -> bool:
        """The command starts with torchrun and leaves the rendezvous to us."""
        return bool(self.command) and self.command[0].rpartition("/")[2] == "torchrun" and not _own_rendezvous(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data; without the plan, of which only the hash is kept."""
        # Field by field: asdict copies every value, which counts for a thousand jobs.
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        data["env"] = dict(self.env)
        data["pod"] = asdict(self.pod) if self.pod is not None else None
        data["plan"] = _hash(dict(self.plan)) if self.plan is not None else None
        return {"schema": 1, **json.loads(json.dumps(data))}

    def key(self) -> str:
        """16 hex digits over everything that makes it this job: the same words give the same job, from any folder.

        Neither where its traces go counts (`output`), nor why its plan is as it is, nor, of an image whose content is
        known, where its file lies.
        """
        data = self.to_json()
        del data["output"]
        if self.digest or self.address:
            del data["image_file"]
        if self.plan is not None:
            data["plan"] = _hash({name: value for name, value in self.plan.items() if name not in _REMARKS})
        return _hash(data)[:16]

    def known_keys(self) -> tuple[str, str]:
        """The key, and the one that older records have: in them the folder made a job another one."""
        return self.key(), _hash(self.to_json())[:16]


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _own_rendezvous(spec: JobSpec) -> bool:
    own = ("--nnodes", "--node-rank", "--node_rank", "--rdzv", "--master", "--standalone")
    return any(word.startswith(own) for word in spec.command[1:])


def check(spec: JobSpec) -> JobSpec:
    """The same spec.

    Raises:
        DataError: every fault at once, a line each.
    """
    faults = list(_faults(spec))
    if faults:
        what = "this job cannot be made" if len(faults) == 1 else f"this job cannot be made, for {len(faults)} reasons"
        raise DataError(f"{what}:\n" + "\n".join(f"  - {fault}" for fault in faults), "correct what is named above")
    return spec


def _faults(spec: JobSpec) -> list[str]:
    faults = []
    if not _NAME.fullmatch(spec.name):
        faults.append(f"name {spec.name[:60]!r}: small letters, digits and hyphens, at most 53, for every scheduler")
    if not spec.image and not spec.image_file:
        faults.append("image: neither a reference nor a file was given")
    if spec.image:
        faults += _said("image", words.reference, spec.image)
    if not spec.command and not spec.verify:
        faults.append("command: there is none (give it after --)")
    texts = [("command", word) for word in spec.command]
    texts += [(f"env {name[:60]}", value) for name, value in spec.env.items()]
    texts += [("mount", path) for mount in spec.mounts for path in mount[:2]]
    texts += [("output", spec.output), ("image file", spec.image_file or ""), ("workdir", spec.workdir or "")]
    faults += sorted({f"{where}: holds a NUL character or a broken one" for where, text in texts if not _sound(text)})
    if spec.command and not spec.command[0]:
        faults.append("command: its first word is empty")
    for name in (*spec.env, *spec.passed_variables):
        faults += _said("env", words.env_name, name)
    for name in (*spec.env, *spec.passed_variables):
        if name in LEAKS:
            faults.append(f"env {name}: would change which libraries the image loads; set it inside the image instead")
    for mount in spec.mounts:
        for path in mount[:2]:
            if not path.startswith("/"):
                faults.append(f"mount {path[:80]!r}: not an absolute path")
    if spec.workdir is not None and not spec.workdir.startswith("/"):
        faults.append(f"workdir {spec.workdir[:80]!r}: not an absolute path")
    if re.search(r"[\x00-\x1f\x7f]", spec.output):
        faults.append("output: a line break or control character cannot stand in a scheduler's file names")
    if spec.address is not None and not re.fullmatch(r"[0-9a-f]{64}", spec.address):
        faults.append("address: not 64 hex digits")
    if spec.image_digest is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", spec.image_digest):
        faults.append(f"digest {spec.image_digest[:80]!r}: not sha256: and 64 hex digits")
    for name, value in spec.env.items():
        if looks_secret(name, value):
            way = f"--secret {name[:60]}" + ("=SECRET/KEY" if spec.pod is not None else "")
            faults.append(f"env {name[:60]}: looks like a secret, and many can read a script or manifest: {way}")
    if _tells_secret(spec.command):
        faults.append("command: holds something that looks like a secret; give it as a variable: --secret")
    if spec.verify and spec.tasks_per_node != 1:
        faults.append("verify: the proof runs once per node, not in several tasks")
    faults += [f"node {name[:60]!r}: no node's name" for name in spec.exclude if not re.fullmatch(r"[\w.-]+", name)]
    for what, number, low, high in (
        ("nodes", spec.nodes, 1, MAX_NODES),
        ("tasks per node", spec.tasks_per_node, 1, 1024),
        ("GPUs per node", spec.gpus_per_node, 0, 64),
        ("CPUs per task", spec.cpus_per_task, 1, 4096),
        ("memory in MiB", spec.memory_mib, 1, 2**31),
        ("time in minutes", spec.time_minutes, 1, 527_040),
        ("signal seconds", spec.signal_seconds, 0, 65_535),
    ):
        if number is not None and not low <= number <= high:
            faults.append(f"{what}: {number} is not between {low:,} and {high:,}")
    if spec.torchrun and spec.tasks_per_node != 1:
        faults.append("torchrun starts the processes of a node itself: one task per node (--nproc-per-node for more)")
    if spec.requeue and spec.time_minutes is None:
        faults.append("requeue needs a time limit: without one the job is never told to write its checkpoint")
    if spec.time_minutes is not None and spec.signal_seconds >= spec.time_minutes * 60:
        faults.append(f"signal seconds: {spec.signal_seconds} leave nothing of {spec.time_minutes} minutes")
    for label, word in (
        ("partition", spec.partition),
        ("account", spec.account),
        ("constraint", spec.constraint),
        ("qos", spec.qos),
        ("node list", spec.nodelist),
        ("namespace", spec.namespace),
        ("queue", spec.queue),
        ("service account", spec.service_account),
    ):
        if word is not None and not re.fullmatch(r"[A-Za-z0-9_.,:@&|!*\[\]()=+-]{1,2000}", word):
            faults.append(f"{label} {word[:60]!r}: no spaces, quotes, slashes or control characters can stand in it")
    return faults


def _tells_secret(command: tuple[str, ...]) -> bool:
    """Whether a word, or an option's value, must not be written down."""
    before = ""
    for word in command:
        name = word.lstrip("-").partition("=")[0] if word.startswith("--") else ""
        valued = name and "=" in word
        if looks_secret(name if valued else before, word.partition("=")[2] if valued else word):
            return True
        before = name
    return False


def _said(where: str, rule: Any, value: str) -> list[str]:
    try:
        rule(value)
    except DataError as error:
        return [f"{where}: {error.cause}"]
    return []


def _sound(text: str) -> bool:
    return not any(c == "\0" or 0xD800 <= ord(c) <= 0xDFFF for c in text)


def proof_words(spec: JobSpec, *own: str) -> list[str]:
    """The entrypoint's words for `--verify`: the full grade unless the user asked for another; `own` go first."""
    graded = any(word.partition("=")[0] == "--grade" for word in spec.command)
    return ["verify", *own, *([] if graded else ["--grade=full"]), *spec.command]


def torchrun_words(spec: JobSpec, rank: str, address: str, port: str) -> tuple[str, ...]:
    """torchrun's options for a fixed rendezvous, to stand right behind its name; () where the user gave their own.

    The node's rank decides who holds the store, so names need not resolve the same everywhere. The arguments are put
    in as they are: a shell's variables for Slurm, `$(NAME)` for Kubernetes.
    """
    if not spec.torchrun:
        return ()
    mine = (f"--nnodes={spec.nodes}", f"--node-rank={rank}", f"--master-addr={address}", f"--master-port={port}")
    asked = any(word.startswith(("--nproc-per-node", "--nproc_per_node")) for word in spec.command)
    return mine if asked else (*mine, f"--nproc-per-node={max(spec.gpus_per_node, 1)}")
