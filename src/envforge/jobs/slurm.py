"""A job -> an sbatch script, for each of the ways in which clusters run containers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envforge.errors import DataError, UsageError
from envforge.jobs.bundle import image_environment
from envforge.jobs.model import (
    BASE_PORT,
    DIGEST_VARIABLE,
    ENTRYPOINT,
    LEAKS,
    PORTS,
    PREFLIGHT_EXIT,
    JobSpec,
    Mount,
    check,
    proof_words,
    torchrun_words,
)
from envforge.jobs.text import environment, fields

TOOLS = ("pyxis", "apptainer", "oci", "docker", "podman", "none")
SCRIPT = "job.sh"
MAX_RESTARTS = 50  # a job that never gets on would otherwise go round for ever
_TOLD = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OWN = ("ENVFORGE_OUTPUT", "ENVFORGE_JOB", "ENVFORGE_RESTARTS", "ENVFORGE_NODE", "ENVFORGE_PREFLIGHT", DIGEST_VARIABLE)
_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID",
          "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURMD_NODENAME")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """How a tool starts the image: shell words, quoted. flags go to srun, words stand before the entrypoint's own.

    engine: docker or podman, whose containers live outside of the job. note: a remark for the script's reader.
    """

    words: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    engine: str = ""
    note: str = ""
    per_node: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def job_name(spec: JobSpec) -> str:
    """The name that Slurm knows: that of the job, and enough of its key to find exactly this one again."""
    return _named(spec, spec.key())


def _named(spec: JobSpec, key: str) -> str:
    return f"{spec.name}.{key[:8]}"


def render(spec: JobSpec, tool: str, bundle: Mapping[str, Any] | None = None) -> str:
    """The sbatch script.

    Args:
        spec: the job.
        tool: one of TOOLS. bundle: config.json of the image's OCI bundle, for the tool `oci`
            (`write_bundle` makes this job's from it).

    Raises:
        DataError: faults of the job, all at once; a mount that the tool cannot carry. UsageError: no such tool.
    """
    check(spec)
    for name in spec.secrets:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII) or name in LEAKS:
            raise DataError(
                f"secret {name[:60]!r}: with Slurm it is a variable of whoever submits",
                "give its name: --secret HF_TOKEN",
            )
    if re.search(r"[\\]", spec.output):
        raise DataError("output: a backslash cannot stand in Slurm's file names", "choose another folder")
    launch = launch_of(spec, tool, bundle)
    command = list(spec.command)
    if spec.verify:
        command = proof_words(spec, "--json=@")
    rendezvous = torchrun_words(spec, "@", "$MASTER_ADDR", "$MASTER_PORT")
    values: dict[str, Any] = {
        "name": spec.name,
        "tool": tool,
        "directives": _directives(spec),
        "output": spec.output,
        "command": command,
        "rendezvous": rendezvous,
        "own_words": 2 if spec.verify else 1 + len(rendezvous) if rendezvous else 0,
        "kept": sorted({*spec.passed_variables, *spec.secrets}),
        "secrets": spec.secrets,
        "image_env": sorted((name, value) for name, value in launch.env.items() if name not in spec.env),
        "env": sorted(spec.env.items()),
        "digest": spec.digest,
        "digest_variable": DIGEST_VARIABLE,
        "base_port": BASE_PORT,
        "ports": PORTS,
        "nodes": spec.nodes,
        "world": spec.world,
        "tasks_per_node": spec.tasks_per_node,
        "cpus_per_task": spec.cpus_per_task,
        "note": launch.note,
        "flags": launch.flags,
        "launch": launch.words,
        "engine": launch.engine,
        "per_node": launch.per_node,
        "preflight": _preflight(spec),
        "refused": PREFLIGHT_EXIT,
        "requeue": spec.requeue,
        "max_restarts": MAX_RESTARTS,
    }
    return environment().get_template("slurm.sh.j2").render(values)


def _directives(spec: JobSpec) -> list[tuple[str, object | None]]:
    key = spec.key()
    signal = f"B:TERM@{spec.signal_seconds}" if spec.time_minutes and spec.signal_seconds else None
    rows: list[tuple[str, object | None]] = [
        ("job-name", _named(spec, key)),
        ("comment", f"envforge:{key}"),
        ("nodes", spec.nodes),
        ("ntasks-per-node", spec.tasks_per_node),
        ("cpus-per-task", spec.cpus_per_task),
        ("mem", f"{spec.memory_mib}M" if spec.memory_mib else None),
        ("gres", f"gpu:{spec.gpus_per_node}" if spec.gpus_per_node else None),
        ("time", spec.time_minutes),
        ("partition", spec.partition),
        ("account", spec.account),
        ("constraint", spec.constraint),
        ("qos", spec.qos),
        ("nodelist", spec.nodelist),
        ("exclude", ",".join(spec.exclude) or None),
        ("signal", signal),
        ("output", spec.output.replace("%", "%%") + "/%j.log"),
        ("open-mode", "append"),
    ]
    return [*(row for row in rows if row[1] is not None), ("requeue" if spec.requeue else "no-requeue", None)]


def _preflight(spec: JobSpec) -> list[str]:
    words = [f"--nodes={spec.nodes}"]
    if spec.gpus_per_node:
        words += [f"--gpus={spec.gpus_per_node}", "--own"]
    return [*words, *([f"--address={spec.address}"] if spec.address else [])]


def names_in(spec: JobSpec) -> list[str]:
    """The variables that a container gets: the job's, the allowed ones, and what says which task it is."""
    return sorted({*spec.env, *spec.passed_variables, *spec.secrets, *_TOLD, *_OWN, *_SLURM})


def enroot_reference(image: str) -> str:
    """An image reference as enroot wants it: `docker://registry#repository:tag`.

    A tag and a digest together are more than it reads: the tag stays, and the preflight compares the content.
    """
    name, _, digest = image.partition("@")
    first, slash, rest = name.partition("/")
    registry = first if slash and ("." in first or ":" in first or first == "localhost") else ""
    repository = rest if registry else name
    tagged = ":" in repository.rpartition("/")[2]
    if digest and not tagged:
        repository += f"@{digest}"
    return "docker://" + (f"{registry}#{repository}" if registry else repository)


def launch_of(spec: JobSpec, tool: str, bundle: Mapping[str, Any] | None = None) -> Launch:
    """The tool's words for this job.

    Raises:
        UsageError: unknown tool, or one that lacks what it starts from. DataError: what it cannot carry.
    """
    makers = {"pyxis": _pyxis, "apptainer": _apptainer, "docker": _docker, "podman": _podman, "none": _none}
    if tool == "oci":
        return _oci(spec, bundle)
    if tool not in makers:
        raise UsageError(f"no container tool is named {tool[:40]!r}", f"known: auto, {', '.join(TOOLS)}")
    return makers[tool](spec)


def mounts_of(spec: JobSpec) -> tuple[Mount, ...]:
    """The job's mounts, and its output folder at the same place inside."""
    return (*spec.mounts, Mount(spec.output, spec.output, False))


def _staging(spec: JobSpec, kind: str) -> str:
    if spec.image_file or spec.nodes == 1:
        return ""
    return (
        f"Each node fetches the image by itself: stage it once with envforge images export --to {kind}, --image-file."
    )


def _pyxis(spec: JobSpec) -> Launch:
    rows = []
    for mount in mounts_of(spec):
        if any(c in path for path in mount[:2] for c in ",:"):
            raise DataError(f"mount {mount.source}: pyxis reads , and : as separators", "mount a folder without them")
        rows.append(f"{mount.source}:{mount.target}" + (":ro" if mount.read_only else ""))
    flags = [
        f"--container-image={shlex.quote(spec.image_file or enroot_reference(spec.image))}",
        '--container-name="envforge-$SLURM_JOB_ID"',
        f"--container-mounts={shlex.quote(','.join(rows))}",
        f"--container-env={','.join(names_in(spec))}",
        "--no-container-mount-home",
    ]
    if spec.workdir:
        flags.append(f"--container-workdir={shlex.quote(spec.workdir)}")
    return Launch((ENTRYPOINT,), tuple(flags), note=_staging(spec, "sqsh"))


def _apptainer(spec: JobSpec) -> Launch:
    words = ["apptainer", "exec", "--no-home", *(["--nv"] if spec.gpus_per_node else [])]
    words += ["--pwd", shlex.quote(spec.workdir or "/workspace")]
    for mount in mounts_of(spec):
        row = [
            "type=bind",
            f"source={mount.source}",
            f"destination={mount.target}",
            *(["ro"] if mount.read_only else []),
        ]
        words += ["--mount", shlex.quote(fields(*row))]
    words += [shlex.quote(spec.image_file or f"docker://{spec.image}"), ENTRYPOINT]
    return Launch(tuple(words), note=_staging(spec, "sif"))


def _engine(spec: JobSpec, engine: str, own: list[str]) -> Launch:
    if not spec.image:
        raise UsageError(f"{engine} runs an image by its reference, and only a file was given", "give its reference")
    words = [engine, "run", "--rm", "--name=@", "--network=host", "--ipc=host"]
    if spec.nodes > 1 and spec.gpus_per_node:
        words.append("--ulimit=memlock=-1:-1")  # for RDMA; an engine without privileges may not raise it
    words += own
    for mount in mounts_of(spec):
        row = [
            "type=bind",
            f"source={mount.source}",
            f"target={mount.target}",
            *(["readonly"] if mount.read_only else []),
        ]
        words.append(f"--mount={shlex.quote(fields(*row))}")
    words += [f"--env={name}" for name in names_in(spec)]
    if spec.workdir:
        words.append(f"--workdir={shlex.quote(spec.workdir)}")
    words += [f"--entrypoint={ENTRYPOINT}", shlex.quote(spec.image)]
    return Launch(tuple(words), engine=engine)


def _docker(spec: JobSpec) -> Launch:
    return _engine(spec, "docker", ["--init", '--user="$(id -u):0"', *(["--gpus=@"] if spec.gpus_per_node else [])])


def _podman(spec: JobSpec) -> Launch:
    # No --init: its program is a package of its own, which not every node has. In a rootless podman the user is root
    # inside and only there; the files are still the user's own outside.
    return _engine(spec, "podman", ["--device=@"] if spec.gpus_per_node else [])


def _none(spec: JobSpec) -> Launch:
    if not spec.image_file:
        raise UsageError("without a container the environment's folder is needed", "name it with --image-file DIR")
    flags = (f"--chdir={shlex.quote(spec.workdir)}",) if spec.workdir else ()
    return Launch((shlex.quote(f"{spec.image_file}/bin/envforge-entrypoint"),), flags)


def _oci(spec: JobSpec, bundle: Mapping[str, Any] | None) -> Launch:
    if not spec.image_file or bundle is None:
        raise UsageError(
            "Slurm's --container takes an OCI bundle, a folder with config.json and a root file system",
            "unpack the image once where all nodes see it, and name the folder with --image-file",
        )
    if spec.tasks_per_node != 1:
        raise DataError("Slurm's --container does not tell tasks apart", "one task per node, and torchrun for more")
    # Slurm puts the job's environment in the place of the image's, so it has to hold both.
    env = image_environment(bundle)
    flags = (f"--container={shlex.quote(spec.output + '/bundle')}",)
    return Launch((ENTRYPOINT,), flags, per_node=True, env=env)
