"""What `job slurm` and `job kubernetes` have in common: their options, and how words become images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from envforge.cli.target import Targets
    from envforge.jobs.fleet import Fleet, Needs
    from envforge.jobs.model import Mount
    from envforge.resolver.plan import Plan

_META = "envforge.command"
_JOB, _RUN = "Job", "In the container"

NameOption = Annotated[str | None, typer.Option("--name", help="Name of the job.", rich_help_panel=_JOB)]
NodesOption = Annotated[int, typer.Option("--nodes", min=1, help="Nodes.", rich_help_panel=_JOB)]
GpusOption = Annotated[
    int | None, typer.Option("--gpus", min=0, help="GPUs per node (1 for a GPU image).", rich_help_panel=_JOB)
]
CpusOption = Annotated[int | None, typer.Option("--cpus", min=1, help="CPUs per task.", rich_help_panel=_JOB)]
MemoryOption = Annotated[
    int | None, typer.Option("--memory", metavar="MIB", min=1, help="Memory per node in MiB.", rich_help_panel=_JOB)
]
TimeOption = Annotated[
    int | None, typer.Option("--time", metavar="MINUTES", min=1, help="Time limit.", rich_help_panel=_JOB)
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder that all nodes see, for logs and receipts.", rich_help_panel=_JOB),
]
SubmitOption = Annotated[bool, typer.Option("--submit", help="Hand it to the scheduler.", rich_help_panel=_JOB)]
AgainOption = Annotated[
    int, typer.Option("--again", metavar="N", min=0, help="Run the same job an Nth time more.", rich_help_panel=_JOB)
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Run the full proof and keep its receipt.", rich_help_panel=_JOB)
]
RequeueOption = Annotated[
    bool, typer.Option("--requeue", help="Go on after the time limit, from the checkpoint.", rich_help_panel=_JOB)
]
SignalOption = Annotated[
    int,
    typer.Option(
        "--signal-seconds", min=0, help="SIGTERM so long before the limit, for a checkpoint.", rich_help_panel=_JOB
    ),
]
EnvOption = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable.", rich_help_panel=_RUN)
]
PassOption = Annotated[
    list[str] | None,
    typer.Option("--pass", metavar="NAME", help="A variable of this machine that goes along.", rich_help_panel=_RUN),
]
SecretOption = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="NAME", help="A secret, by name; never written.", rich_help_panel=_RUN),
]
MountOption = Annotated[
    list[str] | None,
    typer.Option("--mount", metavar="SOURCE:TARGET[:rw]", help="A folder of the nodes.", rich_help_panel=_RUN),
]
WorkdirOption = Annotated[str | None, typer.Option("--workdir", help="Working folder.", rich_help_panel=_RUN)]
ImageFileOption = Annotated[
    Path | None,
    typer.Option("--image-file", help="The image as the cluster has it: .sqsh, .sif, OCI bundle, environment folder."),
]
DigestOption = Annotated[
    str | None, typer.Option("--digest", help="Digest of the image that the file was made from; receipts carry it.")
]


class DashedCommand(TyperCommand):
    """A command that takes everything behind `--` as another command's words, untouched."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Cut the line at the first `--`."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_META] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


def command_words(ctx: typer.Context) -> tuple[str, ...]:
    """What stood behind `--`."""
    found: tuple[str, ...] = ctx.meta.get(_META, ())
    return found


@dataclass(frozen=True)
class Source:
    """One image as the command line's words name it, with what is known of it."""

    image: str = ""
    image_file: str | None = None
    digest: str | None = None
    address: str | None = None
    plan: Plan | None = None
    name: str = "job"  # of the stack or project: the job's name where none is given

    @property
    def gpu(self) -> bool:
        """It is known to be for GPUs."""
        return self.plan is not None and self.plan.variant != "cpu"

    def needs(self) -> Needs:
        """What it asks of a node."""
        from envforge.jobs.fleet import Needs

        if self.plan is None:
            return Needs()
        target = self.plan.target
        return Needs(self.plan.variant, target.driver_floor, target.sm, target.arch)

    def fields(self) -> dict[str, Any]:
        """As arguments of a JobSpec."""
        plan = self.plan
        return {
            "image": self.image,
            "image_file": self.image_file,
            "image_digest": self.digest,
            "address": self.address,
            "plan": plan.to_json() if plan else None,
            "variant": plan.variant if plan else None,
            "driver_floor": plan.target.driver_floor if plan else None,
            "sms": plan.target.sm if plan else (),
        }


def pairs(values: list[str] | None) -> dict[str, str]:
    """NAME=VALUE words.

    Raises:
        UsageError: one without `=`.
    """
    from envforge.errors import UsageError

    found = {}
    for word in values or []:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--env {word[:60]!r} has no =", "give it as NAME=VALUE; --pass NAME takes it from here")
        found[name] = value
    return found


def mounts(values: list[str] | None) -> tuple[Mount, ...]:
    """SOURCE:TARGET words, read-only unless they end in :rw; a relative source is this folder's.

    Raises:
        UsageError: one that is not of that form.
    """
    from envforge.errors import UsageError
    from envforge.jobs.model import Mount

    found = []
    for word in values or []:
        rest = word.removesuffix(":rw").removesuffix(":ro")
        source, colon, target = rest.rpartition(":")
        if not colon or not source:
            raise UsageError(
                f"--mount {word[:80]!r} is not of the form SOURCE:TARGET[:rw]", "for example --mount /data:/data"
            )
        found.append(Mount(str(Path(source).absolute()), target, not word.endswith(":rw")))
    return tuple(found)


def passed(names: list[str] | None) -> dict[str, str]:
    """Variables of this machine that go along by name, with their values.

    Raises:
        UsageError: one is not set here.
    """
    import os

    from envforge.errors import UsageError

    missing = [name for name in names or [] if name not in os.environ]
    if missing:
        raise UsageError(f"--pass {missing[0]}: it is not set here", "set it, or give its value with --env NAME=VALUE")
    return {name: os.environ[name] for name in names or []}


def names_model(command: tuple[str, ...], env: dict[str, str]) -> bool:
    """Whether a proof with these options knows its model, or is of the grade that needs none."""
    named = any(word.split("=")[0] in ("--model", "--gguf") for word in command) or bool(env.get("ENVFORGE_MODEL"))
    return named or ("static" in command and "--grade" in command) or "--grade=static" in command


def with_model(
    command: tuple[str, ...], given: tuple[Mount, ...], env: dict[str, str]
) -> tuple[tuple[str, ...], tuple[Mount, ...]]:
    """The proof's options and the job's mounts, with the small model where the user named none.

    Raises:
        UsageError: no model is named, and the small one was not made yet.
    """
    from envforge.errors import UsageError
    from envforge.jobs.model import Mount
    from envforge.models import default_folder, is_complete

    if names_model(command, env):
        return command, given
    folder = default_folder().absolute()
    if not is_complete(folder):
        raise UsageError(
            "the proof needs a model, and none is named",
            "-- --model DIR (with --mount DIR:DIR where it is no folder of the image), or envforge model small",
        )
    return (*command, "--model", "/envforge-model"), (*given, Mount(str(folder), "/envforge-model"))


def find_sources(
    words: list[str], files: list[Path], spec: str | None, targets: Targets, image_file: Path | None, digest: str | None
) -> list[Source]:
    """The images that are meant: by reference, by project or environment folder, by file, or by what they were built
    from. Several references or folders are several images (for a fleet); requirements together are one.

    Raises:
        UsageError: nothing is named, or what is named was not built yet.
    """
    from dataclasses import replace

    from envforge.errors import UsageError

    named = [word for word in words if Path(word).is_dir() or is_reference(word)]
    if named and len(named) != len(words):
        other = next(word for word in words if word not in named)
        raise UsageError(f"{other!r} stands beside images or folders", "name images, or requirements, not both")
    found = [from_folder(Path(word)) if Path(word).is_dir() else from_reference(word) for word in named]
    if not found and (words or files or spec):
        found = [from_request(words, files, spec, targets)]
    if image_file is not None:
        if len(found) > 1:
            raise UsageError("--image-file is one image, and several are named", "make a job for each")
        base = found[0] if found else Source()
        path = image_file.absolute()
        found = [replace(base, image_file=str(path), plan=base.plan or plan_beside(path))]
    if digest is not None:
        found = [replace(source, digest=digest) for source in found]
    if not found:
        raise UsageError(
            "no image is named",
            "name a reference, a project folder that was built, or --image-file; the command follows --",
        )
    return found


def is_reference(word: str) -> bool:
    """An image reference, and no PEP 508 requirement: it has a slash, a tag or a digest."""
    from packaging.requirements import InvalidRequirement, Requirement

    from envforge.errors import DataError
    from envforge.words import reference

    try:
        reference(word)
    except DataError:
        return False
    if "@sha256:" in word:
        return True  # PEP 508 would read an address behind the @
    try:
        Requirement(word)
    except InvalidRequirement:
        return "/" in word or ":" in word
    return False


def from_folder(folder: Path) -> Source:
    """A project that was built, or an environment folder.

    Raises:
        UsageError: it is neither.
    """
    import json

    from envforge.errors import DataError, UsageError
    from envforge.project import read_plan

    name = folder.absolute().name
    try:
        data = json.loads((folder / "build.json").read_text(encoding="utf-8"))
        engine, address = str(data["engine"]), str(data["address"])
        where, reference = data.get("registry") or {}, str(data["reference"])
    except FileNotFoundError:
        if (folder / "bin" / "envforge-entrypoint").is_file():
            return Source(image_file=str(folder.absolute()), plan=plan_beside(folder), name=name)
        raise UsageError(
            f"{folder} holds no build.json and no environment", f"build it first: envforge build {folder}"
        ) from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"{folder / 'build.json'} is damaged ({error})", f"build again: envforge build {folder}"
        ) from error
    plan = read_plan(folder)
    if plan is not None and data.get("plan_hash") not in (None, plan.hash()):
        raise UsageError(f"the plan of {folder} changed since it was built", f"build it anew: envforge build {folder}")
    if engine == "venv":
        return Source(image_file=str((folder / reference).resolve()), address=address, plan=plan, name=name)
    image = str(where.get("image") or reference)
    return Source(image, digest=str(data.get("digest") or "") or None, address=address, plan=plan, name=name)


def from_reference(reference: str) -> Source:
    """An image by name; its labels tell the rest where the engine of this machine has it."""
    from envforge.image.engines.docker import DockerEngine

    name = reference.partition("@")[0].rpartition("/")[2].partition(":")[0]
    try:
        engine = DockerEngine()
        info = engine.inspect(reference) if engine.available().ok else None
    except Exception:  # noqa: BLE001 - a look that may fail: the job needs no engine on this machine
        info = None
    if info is None:
        return Source(reference, name=name)
    return _labelled(reference, name, info.id, info.labels)


def _labelled(reference: str, name: str, digest: str, labels: dict[str, str]) -> Source:
    from envforge.image.render import unpack_plan
    from envforge.image.values import LABEL_ADDRESS, LABEL_PLAN
    from envforge.resolver.plan import load_plan

    label = labels.get(LABEL_PLAN)
    plan = load_plan(unpack_plan(label), f"the plan of {reference}") if label else None
    own = None if "@" in reference else digest
    return Source(reference, digest=own, address=labels.get(LABEL_ADDRESS), plan=plan, name=name)


def from_request(words: list[str], files: list[Path], spec: str | None, targets: Targets) -> Source:
    """The image that a build of these words made on this machine.

    Raises:
        UsageError: there is none yet. ConflictError and others of resolving and locking.
    """
    import sys

    from envforge.cli.planned import find_plan, spec_pythons, surroundings
    from envforge.cli.stages import stage_printer
    from envforge.errors import UsageError
    from envforge.image.engines import choose_engine
    from envforge.image.values import LABEL_LOCK_HASH, LABEL_VARIANT

    with stage_printer(sys.stderr) as progress:
        engine = choose_engine("docker")
        around = surroundings(engine, None, targets, spec_pythons(words, files, spec))
        found = find_plan(words, files, spec, targets, wheelhouse=None, ca=None, progress=progress, around=around)
        images = engine.find(LABEL_LOCK_HASH, found.lock.hash)
    fits = [image for image in images if image.labels.get(LABEL_VARIANT) == found.plan.variant and image.names]
    if not fits:
        raise UsageError("what was asked for is not built yet", "envforge build with the same words, then this again")
    return _labelled(fits[0].names[0], found.spec.name, fits[0].id, fits[0].labels)


def plan_beside(path: Path) -> Plan | None:
    """The plan in an environment folder or in an unpacked image, None where it holds none."""
    from envforge.errors import EnvforgeError
    from envforge.project import read_plan

    for folder in (path, path / "rootfs" / "opt" / "envforge"):
        try:
            plan = read_plan(folder)
        except EnvforgeError:
            continue
        if plan is not None:
            return plan
    return None


def as_name(text: str) -> str:
    """Any word as a job's name."""
    import re

    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:53].strip("-") or "job"


def mapped(sources: list[Source], targets: Targets) -> Fleet | None:
    """Which image runs on which of the described hosts; None where none are described.

    Raises:
        NoError: not one host is covered. UsageError: several images and no hosts to tell them apart by.
    """
    from dataclasses import replace

    from envforge.errors import NoError, UsageError
    from envforge.jobs.fleet import assign

    if not (targets.host or targets.fleet or targets.gpu or targets.driver):
        if len(sources) > 1:
            raise UsageError("several images need the nodes that they are for", "describe them with --fleet FILE")
        return None
    found = assign([source.needs() for source in sources], targets.read())
    if not found.groups:
        raise NoError(
            "no image runs on the described hosts:\n" + "\n".join(f"  {host}: {why}" for host, why in found.uncovered),
            "build one for them: envforge build ... with the same target",
        )
    if not targets.fleet and not targets.host:
        return replace(found, names=())  # a description, no nodes of a cluster
    return found
