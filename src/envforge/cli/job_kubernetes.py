"""envforge job kubernetes: a Job manifest for an image and a command, and its submission."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envforge.cli import job_options as o
from envforge.cli import target as t

if TYPE_CHECKING:
    from envforge.errors import OutsideError
    from envforge.jobs.manifest import Manifest
    from envforge.jobs.model import Claim, JobSpec

_KUBE, _NODES = "Kubernetes", "Kubernetes: where it may run"
FILES = (".yaml", ".yml", ".json")


def register(job: typer.Typer) -> None:
    """Add the command."""
    job.command("kubernetes", cls=o.DashedCommand)(kubernetes)


@dataclass(frozen=True)
class Job:
    """One job with its objects."""

    spec: JobSpec
    objects: list[Manifest]
    hosts: tuple[str, ...] = ()


def kubernetes(
    ctx: typer.Context,
    request: Annotated[
        list[str] | None,
        typer.Argument(help="An image, a built project folder, or the requirements it was built from."),
    ] = None,
    requirement: Annotated[list[Path] | None, typer.Option("--requirement", "-r", help="A requirements file.")] = None,
    spec: Annotated[str | None, typer.Option(help="A ready-made stack by name, or an image.yaml.")] = None,
    digest: o.DigestOption = None,
    host: t.HostOption = None,
    fleet: t.FleetOption = None,
    driver: t.DriverOption = None,
    gpu: t.GpuOption = None,
    glibc: t.GlibcOption = None,
    arch: t.ArchOption = None,
    python: t.PythonOption = None,
    variant: t.VariantOption = "auto",
    name: o.NameOption = None,
    nodes: o.NodesOption = 1,
    gpus: o.GpusOption = None,
    cpus: o.CpusOption = None,
    memory: o.MemoryOption = None,
    time: o.TimeOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File for the manifest (.yaml, .json), or folder for the job's records."),
    ] = None,
    submit: o.SubmitOption = False,
    again: o.AgainOption = 0,
    verify: o.VerifyOption = False,
    requeue: o.RequeueOption = False,
    signal_seconds: o.SignalOption = 120,
    env: o.EnvOption = None,
    passed: o.PassOption = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="NAME=SECRET/KEY",
            help="A variable from a Secret's key, or a whole Secret by name.",
            rich_help_panel="In the container",
        ),
    ] = None,
    mount: o.MountOption = None,
    workdir: o.WorkdirOption = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.", rich_help_panel=_KUBE)] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Namespace.", rich_help_panel=_KUBE)
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Kueue's local queue.", rich_help_panel=_KUBE)] = None,
    service_account: Annotated[str | None, typer.Option(help="Service account.", rich_help_panel=_KUBE)] = None,
    claim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:TARGET[:ro]", help="A volume claim, for caches and data.", rich_help_panel=_KUBE),
    ] = None,
    pull_secret: Annotated[
        list[str] | None, typer.Option(help="Secret with the registry's login.", rich_help_panel=_KUBE)
    ] = None,
    shm: Annotated[
        int | None, typer.Option(min=1, metavar="MIB", help="Cap of /dev/shm.", rich_help_panel=_KUBE)
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, max=100, help="Start a failed node's part again.", rich_help_panel=_KUBE)
    ] = 0,
    user: Annotated[int | None, typer.Option(min=1, help="Numeric user id.", rich_help_panel=_KUBE)] = None,
    writable_root: Annotated[
        bool, typer.Option("--writable-root", help="Let the image's own folders be written.", rich_help_panel=_KUBE)
    ] = False,
    gpu_resource: Annotated[
        str, typer.Option(help="Resource name of the GPUs (MIG has others).", rich_help_panel=_KUBE)
    ] = "nvidia.com/gpu",
    resource: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="A further resource (rdma/hca=1).", rich_help_panel=_KUBE)
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label of the nodes.", rich_help_panel=_NODES)
    ] = None,
    toleration: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY[=VALUE][:EFFECT]", help="A taint to tolerate.", rich_help_panel=_NODES),
    ] = None,
    priority_class: Annotated[str | None, typer.Option(help="Priority class.", rich_help_panel=_NODES)] = None,
    runtime_class: Annotated[str | None, typer.Option(help="Runtime class.", rich_help_panel=_NODES)] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Write a Kubernetes Job that runs a command in an image, or submit it. The command follows --.

    It runs only on nodes that the image's plan covers, and every node is looked at first (preflight, exit code 86).
    Submitting the same job twice starts it once.
    """
    import json

    from envforge.errors import UsageError
    from envforge.jobs.manifest import manifests
    from envforge.jobs.model import JobSpec, Pod

    targets = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant)
    sources = o.find_sources(request or [], requirement or [], spec, targets, None, digest)
    mapped = o.mapped(sources, targets)
    of_cluster = {found.name for found in targets.read() if found.source == "kubernetes"} if mapped else set()
    file = output if output is not None and output.suffix in FILES else None
    folder = output if file is None else None
    pod = Pod(
        gpu_resource=gpu_resource,
        shm_mib=shm,
        retries=retries,
        user=user,
        writable_root=writable_root,
        labels=_pairs("--label", label),
        tolerations=tuple(toleration or ()),
        resources=_pairs("--resource", resource),
        pull_secrets=tuple(pull_secret or ()),
        priority_class=priority_class,
        runtime_class=runtime_class,
    )
    command, variables = o.command_words(ctx), o.passed(passed) | o.pairs(env)
    if verify and not o.names_model(command, variables):
        raise UsageError(
            "the proof needs a model, and none is named: the small one of this machine is not on the cluster's nodes",
            "-- --model OWNER/NAME, or -- --model DIR with --claim NAME:DIR; or -- --grade=static",
        )
    jobs: list[Job] = []
    groups = mapped.groups if mapped else (None,)
    for group in groups:
        source = sources[group.image] if group else sources[0]
        own = name or o.as_name(f"verify-{source.name}" if verify else source.name)
        own = f"{own[:49].strip('-')}-{group.image + 1}" if len(groups) > 1 and group else own
        root = (folder or Path("envforge-jobs")).absolute()
        hosts = group.hosts if group else ()
        made = JobSpec(
            name=own,
            command=command,
            nodes=nodes,
            gpus_per_node=int(source.gpu) if gpus is None else gpus,
            cpus_per_task=cpus,
            memory_mib=memory,
            time_minutes=time,
            env=variables,
            mounts=o.mounts(mount),
            secrets=tuple(secret or ()),
            nodelist=",".join(hosts) if hosts and set(hosts) <= of_cluster else None,
            namespace=namespace,
            queue=queue,
            service_account=service_account,
            claims=_claims(claim),
            pod=pod,
            requeue=requeue,
            signal_seconds=signal_seconds,
            verify=verify,
            passed_variables=(),
            output=str(root if folder and len(groups) == 1 else root / own),
            workdir=workdir,
            attempt=again,
            **source.fields(),
        )
        jobs.append(Job(made, manifests(made), hosts))
    uncovered = mapped.uncovered if mapped else ()
    if file is not None:
        _write_file(file, [item for job in jobs for item in job.objects])
    rows = [_submit(job, context) if submit else _write(job, folder is not None, file) for job in jobs]
    if json_:
        left = [{"host": host, "reason": reason} for host, reason in uncovered]
        typer.echo(json.dumps({"schema": 1, "jobs": rows, "uncovered": left}, indent=1, ensure_ascii=False))
    else:
        _tell(jobs, rows, file)
        for host_name, reason in uncovered:
            typer.echo(f"{host_name}: no image covers it: {reason}", err=True)
    if uncovered:
        raise typer.Exit(1)


def _pairs(option: str, values: list[str] | None) -> dict[str, str]:
    from envforge.errors import UsageError

    found = {}
    for word in values or []:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{option} {word[:60]!r} has no =", f"give it as {option} NAME=VALUE")
        found[key] = value
    return found


def _claims(values: list[str] | None) -> tuple[Claim, ...]:
    from envforge.errors import UsageError
    from envforge.jobs.model import Claim

    found = []
    for word in values or []:
        name, colon, target = word.removesuffix(":ro").removesuffix(":rw").partition(":")
        if not colon:
            raise UsageError(f"--claim {word[:80]!r} is not of the form NAME:TARGET[:ro]")
        found.append(Claim(name, target, word.endswith(":ro")))
    return tuple(found)


def _answer(job: Job, **more: Any) -> dict[str, Any]:
    spec = job.spec
    row = {"name": spec.name, "key": spec.key(), "nodes": spec.nodes, "gpus": spec.gpus_per_node}
    row |= {"image": spec.image, "digest": spec.digest, "output": spec.output}
    row |= {"hosts": list(job.hosts), "manifests": job.objects}
    return {**row, "job_id": None, "new": False, "script": None, **more}


def _write_file(file: Path, objects: list[Manifest]) -> None:
    from envforge.files import write_atomic
    from envforge.jobs.manifest import dump

    write_atomic(file, dump(objects, as_json=file.suffix == ".json"))


def _write(job: Job, named: bool, file: Path | None) -> dict[str, Any]:
    """The manifest in the job's folder where one was named, else it is told on stdout."""
    from envforge.files import write_atomic
    from envforge.jobs.kubernetes import SCRIPT
    from envforge.jobs.manifest import dump
    from envforge.jobs.record import new_record, write_unasked

    if not named:
        return _answer(job, script=str(file) if file else None)
    write_unasked(new_record(job.spec, "kubernetes", script=SCRIPT, log="%j-rank*.log"))
    path = Path(job.spec.output) / SCRIPT
    write_atomic(path, dump(job.objects))
    return _answer(job, script=str(path))


def _submit(job: Job, context: str | None) -> dict[str, Any]:
    from envforge.errors import OutsideError
    from envforge.jobs.kubernetes import SCRIPT, submit

    try:
        record, new = submit(job.spec, job.objects, context)
    except OutsideError as error:
        raise explained(error) from error
    return _answer(job, job_id=record.job_id, new=new, script=str(Path(job.spec.output) / SCRIPT))


def explained(error: OutsideError) -> OutsideError:
    """A scheduler's refusal with what diagnose knows of it: its id, and what to do."""
    import io

    from envforge.diagnose import diagnose
    from envforge.errors import OutsideError

    findings = diagnose(io.BytesIO(error.cause.encode())).findings
    if not findings:
        return error
    return OutsideError(error.cause, "; ".join(filter(None, (*findings[0].fixes[:1], error.hint))), id=findings[0].id)


def _tell(jobs: list[Job], rows: list[dict[str, Any]], file: Path | None) -> None:
    from envforge.jobs.manifest import dump

    for job, row in zip(jobs, rows, strict=True):
        if row["job_id"] is not None:
            typer.echo(row["job_id"])
            word = "submitted" if row["new"] else "is there already (--again 1 runs it once more)"
            typer.echo(f"job {job.spec.name} {word}: {row['job_id']}, records in {job.spec.output}", err=True)
        elif row["script"] is not None and row["script"] != str(file):
            typer.echo(row["script"])
        elif file is None:
            typer.echo(dump(job.objects), nl=False)
    if file is not None and jobs and rows[0]["job_id"] is None:
        typer.echo(str(file))
