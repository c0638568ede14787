"""envforge job slurm: an sbatch script for an image and a command, and its submission."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envforge.cli import job_options as o
from envforge.cli import target as t

if TYPE_CHECKING:
    from envforge.jobs.model import JobSpec

_SLURM = "Slurm"


def register(job: typer.Typer) -> None:
    """Add the command."""
    job.command("slurm", cls=o.DashedCommand)(slurm)


@dataclass(frozen=True)
class Job:
    """One job with its script and tool."""

    spec: JobSpec
    tool: str
    script: str
    hosts: tuple[str, ...] = ()


def slurm(
    ctx: typer.Context,
    request: Annotated[
        list[str] | None,
        typer.Argument(help="An image, a built project or environment folder, or the requirements it was built from."),
    ] = None,
    requirement: Annotated[list[Path] | None, typer.Option("--requirement", "-r", help="A requirements file.")] = None,
    spec: Annotated[str | None, typer.Option(help="A ready-made stack by name, or an image.yaml.")] = None,
    image_file: o.ImageFileOption = None,
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
    output: o.OutputOption = None,
    submit: o.SubmitOption = False,
    again: o.AgainOption = 0,
    verify: o.VerifyOption = False,
    requeue: o.RequeueOption = False,
    signal_seconds: o.SignalOption = 120,
    env: o.EnvOption = None,
    passed: o.PassOption = None,
    secret: o.SecretOption = None,
    mount: o.MountOption = None,
    workdir: o.WorkdirOption = None,
    tool: Annotated[
        str,
        typer.Option(
            "--container-tool", help="auto, pyxis, apptainer, oci, docker, podman, none.", rich_help_panel=_SLURM
        ),
    ] = "auto",
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="Tasks per node.", rich_help_panel=_SLURM)] = 1,
    partition: Annotated[str | None, typer.Option(help="Partition.", rich_help_panel=_SLURM)] = None,
    account: Annotated[str | None, typer.Option(help="Account.", rich_help_panel=_SLURM)] = None,
    constraint: Annotated[str | None, typer.Option(help="Features of the nodes.", rich_help_panel=_SLURM)] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.", rich_help_panel=_SLURM)] = None,
    nodelist: Annotated[str | None, typer.Option(help="Exactly these nodes.", rich_help_panel=_SLURM)] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Write an sbatch script that runs a command in an image, or submit it. The command follows --.

    Every node is looked at first (preflight, exit code 86). Submitting the same job twice starts it once.
    """
    import json

    from envforge.cli.job_tools import choose_tool
    from envforge.errors import UsageError
    from envforge.jobs.bundle import read_config
    from envforge.jobs.model import PASSED, JobSpec, check
    from envforge.jobs.slurm import render

    targets = t.Targets(host, fleet, driver, gpu, glibc, arch, python, variant)
    sources = o.find_sources(request or [], requirement or [], spec, targets, image_file, digest)
    mapped = o.mapped(sources, targets)
    jobs: list[Job] = []
    groups = mapped.groups if mapped else (None,)
    command, mounted = o.command_words(ctx), o.mounts(mount)
    if verify:
        command, mounted = o.with_model(command, mounted, o.pairs(env))
    if submit:
        o.passed(passed)  # a script that is only written finds them where it is submitted
    for group in groups:
        source = sources[group.image] if group else sources[0]
        own = name or o.as_name(f"verify-{source.name}" if verify else source.name)
        own = f"{own[:49].strip('-')}-{group.image + 1}" if len(groups) > 1 and group else own
        root = (output or Path("envforge-jobs")).absolute()
        features: dict[str, Any] = {"constraint": constraint}
        if mapped and group and mapped.others(group):
            if group.feature:
                features["constraint"] = "&".join(filter(None, (constraint, group.feature)))
            else:
                features["exclude"] = mapped.others(group)
        made = check(
            JobSpec(
                name=own,
                command=command,
                nodes=nodes,
                tasks_per_node=tasks,
                gpus_per_node=int(source.gpu) if gpus is None else gpus,
                cpus_per_task=cpus,
                memory_mib=memory,
                time_minutes=time,
                env=o.pairs(env),
                mounts=mounted,
                secrets=tuple(secret or ()),
                partition=partition,
                account=account,
                qos=qos,
                nodelist=nodelist,
                requeue=requeue,
                signal_seconds=signal_seconds,
                verify=verify,
                passed_variables=(*PASSED, *(passed or ())),
                output=str(root if output and len(groups) == 1 else root / own),
                workdir=workdir,
                attempt=again,
                **features,
                **source.fields(),
            )
        )
        chosen = choose_tool(tool, made)
        if chosen == "oci" and not submit and output is None:
            raise UsageError("a job with an OCI bundle is more than a script", "name a folder for it: --output DIR")
        bundle = read_config(Path(made.image_file or "")) if chosen == "oci" else None
        jobs.append(Job(made, chosen, render(made, chosen, bundle), group.hosts if group else ()))
    uncovered = mapped.uncovered if mapped else ()
    rows = [_submit(job) if submit else _write(job, output is not None) for job in jobs]
    if json_:
        left = [{"host": host, "reason": reason} for host, reason in uncovered]
        typer.echo(json.dumps({"schema": 1, "jobs": rows, "uncovered": left}, indent=1, ensure_ascii=False))
    else:
        for job, row in zip(jobs, rows, strict=True):
            _tell(job, row)
        for host_name, reason in uncovered:
            typer.echo(f"{host_name}: no image covers it: {reason}", err=True)
    if uncovered:
        raise typer.Exit(1)


def _answer(job: Job, **more: Any) -> dict[str, Any]:
    spec = job.spec
    row = {"name": spec.name, "key": spec.key(), "tool": job.tool, "nodes": spec.nodes, "gpus": spec.gpus_per_node,
           "image": spec.image or spec.image_file, "digest": spec.digest, "output": spec.output,
           "constraint": spec.constraint, "hosts": list(job.hosts)}  # fmt: skip
    return {**row, "job_id": None, "new": False, "script": None, **more}


def _write(job: Job, named: bool) -> dict[str, Any]:
    """The script in the job's folder where one was named, else on stdout."""
    from envforge.files import write_atomic
    from envforge.jobs.record import new_record, write_unasked
    from envforge.jobs.slurm import SCRIPT

    if not named:
        return _answer(job, text=job.script)
    folder = Path(job.spec.output)
    write_unasked(new_record(job.spec, "slurm", script=SCRIPT, log="%j.log", extra={"tool": job.tool}))
    write_atomic(folder / SCRIPT, job.script, 0o755)
    _prepare(job)
    return _answer(job, script=str(folder / SCRIPT))


def _prepare(job: Job) -> None:
    """What has to lie in the job's folder besides the script."""
    from envforge.jobs.bundle import write_bundle
    from envforge.jobs.slurm import mounts_of

    if job.tool == "oci":
        write_bundle(job.spec, mounts_of(job.spec))


def _submit(job: Job) -> dict[str, Any]:
    from envforge.jobs.scheduler import submit
    from envforge.jobs.slurm import SCRIPT

    _prepare(job)
    record, new = submit(job.spec, job.script, job.tool)
    # A job that was asked for from another folder has its traces there.
    where = {"output": record.output, "script": str(Path(record.output) / SCRIPT)}
    return _answer(job, job_id=record.job_id, new=new, **where)


def _tell(job: Job, row: dict[str, Any]) -> None:
    if row["job_id"] is None:
        typer.echo(row["script"] or row["text"], nl=row["script"] is not None)
        return
    typer.echo(row["job_id"])
    word = "submitted" if row["new"] else "is there already (--again 1 runs it once more)"
    typer.echo(f"job {job.spec.name} {word}: number {row['job_id']}, logs in {row['output']}", err=True)
