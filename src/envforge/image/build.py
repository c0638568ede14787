"""Plan + lock + spec -> a built and proven environment, once.

The order makes a half-made image impossible to mistake for a good one: an image has no name while it is built and
proven; the name is given last. Whoever finds a name of ours may trust it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import DiskFullError, EngineError, ModelError, OutsideError, ProofFailedError, UsageError
from envforge.image import quote
from envforge.image.address import content_address, image_tag
from envforge.image.context import make_context, write_context
from envforge.image.engines import Engine, ImageInfo, Mount, choose_engine
from envforge.image.render import Compile, compile_stage, needs_toolkit, torch_version
from envforge.image.values import (
    LABEL_ADDRESS,
    BaseInfo,
    BuildContext,
    BuildOptions,
    BuildResult,
    Event,
    Grade,
    LockLike,
    Progress,
    silent,
)
from envforge.resolver.plan import Plan

if TYPE_CHECKING:
    from envforge.matrix.model import Base
    from envforge.spec import Spec

PENDING = (
    "the GPU proof is pending: this machine has no GPU that the image can use, so imports, pins and native libraries "
    "were proven and nothing was run on a GPU"
)
SMALL = "small"  # the word for the small real model that a package carries
ModelMaker = Callable[[Engine, ImageInfo, str], Path]
_MODEL = "/opt/envforge/model"
_RECEIPT = "/workspace/receipt.json"


def build_plan(
    plan: Plan,
    lock: LockLike,
    spec: Spec,
    options: BuildOptions,
    *,
    bases: tuple[Base, ...] = (),
    progress: Progress = silent,
    engine: Engine | None = None,
    make_model: ModelMaker | None = None,
) -> BuildResult:
    """Build one plan and prove what was built; where the same was built before, only what is missing is done.

    Args:
        bases: the matrix's base images, for plans without `options.base`.
        engine: the engine to use instead of choosing one by `options.engine`.
        make_model: turns the word `small` into a model folder with the help of what was just built; without it the
            word is passed on as it is.

    Raises:
        UsageError, DataError: something in the options or the spec cannot be.
        EngineError, OutsideError and others of exit code 3: the engine, the index or the disk failed; nothing is left.
        ProofFailedError: the environment was built and did not pass; it has no name.
    """
    start = time.monotonic()
    if options.tag is not None:
        quote.reference(options.tag)
    _check_model(options)
    engine = engine or choose_engine(options.engine, options.output)
    venv = engine.name == "venv"
    progress(Event("stage", f"{engine.name}: looking at the base"))
    base = _base(plan, lock, options, bases, engine, progress)
    address = content_address(plan, lock, spec, base, "venv" if venv else "image")
    state = state_folder(options, address)
    tag = str(options.output) if venv else image_tag(plan, lock, spec, address)
    with _one_at_a_time(state, progress):
        found = None if options.rebuild else next(iter(engine.find(LABEL_ADDRESS, address)), None)
        log = options.log or state / f"build-{_stamp()}.log"
        reused = found is not None
        if found is None:
            _check_space(lock, engine, progress)
            context = make_context(
                plan,
                lock,
                spec,
                base,
                options.source,
                dialect=options.dialect,
                epoch=options.epoch,
                network=options.network,
                compile_stage=_compile_stage(plan, bases),
                kind="venv" if venv else "image",
            )
            found = engine.build(context, log, progress)
        result = BuildResult(
            engine=engine.name,
            reference=tag,
            digest=found.id,
            address=address,
            reused=reused,
            seconds=time.monotonic() - start,
            size=found.size,
            log=None if reused else log,
        )
        if options.verify:
            result = _prove(plan, spec, options, engine, found, result, state, progress, make_model)
        named = engine.tag(found, tag)
        if options.tag is not None and not venv:
            engine.tag(found, options.tag)
    return replace(result, size=named.size, seconds=time.monotonic() - start)


def render_plan(
    plan: Plan, lock: LockLike, spec: Spec, options: BuildOptions, folder: Path, *, bases: tuple[Base, ...] = ()
) -> BuildContext:
    """Write the whole build context into `folder` (made new, or replaced if it is one of ours) without any engine.

    The base is taken on trust: its content is not known here, so the address differs from that of a build that looked.

    Raises:
        UsageError: the folder holds something that is not a context.
        DataError, OutsideError: as for a build.
    """
    chosen = None if options.base else choose_base(plan, lock, bases)
    base = BaseInfo(ref=options.base or pinned(chosen), digest=(chosen.digest or "") if chosen else "")
    if chosen is not None:
        base = replace(base, os=chosen.os, install_python=chosen.kind != "slim")
    context = make_context(
        plan,
        lock,
        spec,
        base,
        options.source,
        dialect=options.dialect,
        epoch=options.epoch,
        compile_stage=_compile_stage(plan, bases),
    )
    if folder.exists() and any(folder.iterdir()) and not (folder / "Dockerfile").is_file():
        raise UsageError(f"{folder} holds something else", "name a new or empty folder with -o")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        write_context(context, fresh)
        if not options.source.secret and options.dialect == "buildkit":
            (fresh / "uv.toml").write_text(options.source.uv_config, encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return context


def choose_base(plan: Plan, lock: LockLike, bases: tuple[Base, ...]) -> Base:
    """The base for a plan: slim, unless something in the lock needs a CUDA toolkit while it runs (deepspeed).

    Raises:
        UsageError: the matrix has no base with the plan's Python.
    """
    toolkit = needs_toolkit(plan)
    if toolkit:
        found = devel_base(plan, bases)
    else:
        fits = (base for base in bases if plan.python in base.pythons and plan.target.arch in base.arch)
        found = next((base for base in fits if base.kind == "slim"), None)
    if found is not None:
        return found
    what = f"a CUDA {plan.cuda} toolkit and Python {plan.python}" if toolkit else f"Python {plan.python}"
    known = sorted(
        {python for base in bases if base.kind == ("cuda-devel" if toolkit else "slim") for python in base.pythons}
    )
    raise UsageError(
        f"no base image is known with {what}",
        f"name one with --base REF, or plan for Python {', '.join(known) or 'another version'}",
        id="no-base",
    )


def devel_base(plan: Plan, bases: tuple[Base, ...]) -> Base | None:
    """The CUDA toolkit image for a plan: torch's own CUDA minor, else the nearest older one of that major, else any.

    Any minor of the major compiles what torch's major runs; an older one asks less of the driver.
    """
    wanted = _numbers(plan.cuda or "")
    fits = [
        base
        for base in bases
        if base.kind == "cuda-devel"
        and plan.python in base.pythons
        and plan.target.arch in base.arch
        and _numbers(base.cuda or "")[:1] == wanted[:1]
    ]
    older = [base for base in fits if _numbers(base.cuda or "")[:2] <= wanted[:2]]
    if older:
        return max(older, key=lambda base: _numbers(base.cuda or ""))
    return min(fits, key=lambda base: _numbers(base.cuda or ""), default=None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def pinned(base: Base | None) -> str:
    """The reference with its digest, where that is known."""
    assert base is not None
    return f"{base.ref}@{base.digest}" if base.digest and "@" not in base.ref else base.ref


def _base(
    plan: Plan, lock: LockLike, options: BuildOptions, bases: tuple[Base, ...], engine: Engine, progress: Progress
) -> BaseInfo:
    if engine.name == "venv":
        return engine.base(options.base or "", plan.python, progress)
    ref = quote.reference(options.base or pinned(choose_base(plan, lock, bases)))
    base = engine.base(ref, plan.python, progress)
    if base.python is None:
        # The interpreter may come from the distribution's own archive: what the matrix says its release brings.
        if any(known.os == base.os and plan.python in known.pythons and known.kind != "slim" for known in bases):
            return replace(base, install_python=True)
        there = f"it has {', '.join(base.pythons)}" if base.pythons else "it has no Python at all"
        raise UsageError(
            f"the base image {ref} has no Python {plan.python}, which the plan is for ({there})",
            "name another base with --base, or plan for another version with --python",
            id="base-python",
        )
    return base


def _compile_stage(plan: Plan, bases: tuple[Base, ...]) -> Compile | None:
    if not plan.source_only:
        return None
    base = devel_base(plan, bases)
    if base is not None:
        return compile_stage(plan, pinned(base), _memory_gib())
    raise UsageError(
        f"{', '.join(plan.source_only)} must be compiled, and no base with a CUDA {plan.cuda} toolkit and Python "
        f"{plan.python} is known",
        "plan for the Python of such a base with --python, or leave the package out",
        id="no-base",
    )


def _check_space(lock: LockLike, engine: Engine, progress: Progress) -> None:
    """Say what will be downloaded and written, and refuse what cannot fit.

    Wheels of this kind unpack to 2 to 3.5 times their size (torch's CPU wheel 3.5, its CUDA libraries under 2), and the
    downloads stay in the build cache beside them. Refused is only what does not fit by the lower figure.
    """
    size = int(getattr(lock, "size", 0) or 0)
    if not size:
        return
    least, likely = int(size * 2.5), size * 4
    progress(Event("stage", f"about {size / 1e6:,.0f} MB to download, up to {likely / 1e6:,.0f} MB of disk"))
    free = engine.free_space()
    if free is not None and free < least:
        raise DiskFullError(
            f"the build needs at least {least / 1e9:.1f} GB of disk, and {free / 1e9:.1f} GB are free where the "
            f"{engine.name} engine keeps its files",
            "free some space (docker builder prune, docker image prune), or build elsewhere",
            id="disk-too-small",
        )


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def state_folder(options: BuildOptions, address: str) -> Path:
    """Where the logs and receipts of one address are kept (made when needed)."""
    from platformdirs import user_state_path

    root = options.state or user_state_path("envforge") / "builds"
    folder = root / address[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutsideError(f"cannot write build logs in {root}: {error.strerror}", "set XDG_STATE_HOME") from error
    return folder


@contextlib.contextmanager
def _one_at_a_time(state: Path, progress: Progress) -> Iterator[None]:
    """Two builds of one address: the second waits, then finds the work done. A killed one leaves no lock behind."""
    from filelock import FileLock, Timeout

    lock = FileLock(state / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(Event("stage", "waiting for another build of the same plan"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _stamp() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S")


def _check_model(options: BuildOptions) -> None:
    model = options.model
    if (
        options.verify
        and model not in (None, SMALL)
        and _is_folder(model or "")
        and not (Path(model or "").expanduser() / "config.json").is_file()
    ):
        raise ModelError(
            f"{model} is not a model folder: it has no config.json", "name the folder that holds the model's files"
        )


def _is_folder(model: str) -> bool:
    return model.startswith((".", "/", "~")) or Path(model).is_dir()


def _prove(
    plan: Plan,
    spec: Spec,
    options: BuildOptions,
    engine: Engine,
    image: ImageInfo,
    result: BuildResult,
    state: Path,
    progress: Progress,
    make_model: ModelMaker | None,
) -> BuildResult:
    """Run `verify` inside, keep its receipt. A receipt of the same content is not earned twice."""
    gpus = plan.variant != "cpu" and engine.gpus()
    grade: Grade = "full" if plan.variant == "cpu" or gpus else "static"
    kept = state / f"receipt-{grade}.json"
    asked = {"digest": image.id, "address": result.address, "model": options.model, "steps": options.steps}
    known = _read_receipt(kept)
    if known is not None and known.get("image") == asked and not options.rebuild:
        return replace(result, receipt=kept, grade=grade, proof=known, pending=_pending(grade))
    model = options.model if grade == "full" else None
    if model is None and grade == "full":
        model = SMALL if spec.model is None or spec.model.small else spec.model.id.removeprefix("hf:")
    if model == SMALL and make_model is not None:
        progress(Event("stage", "getting the small model"))
        model = str(make_model(engine, image, result.reference))
    progress(Event("stage", f"proving it ({grade})"))
    argv = ["verify", "--grade", grade]
    mounts: tuple[Mount, ...] = ()
    network = "none"
    fetch = _RECEIPT
    with contextlib.ExitStack() as stack:
        if engine.name == "venv":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="envforge-proof-"))
            fetch = str(Path(folder) / "receipt.json")
        argv += ["--json", fetch]
        if options.steps is not None:
            argv += ["--steps", str(options.steps)]
        env = {"ENVFORGE_IMAGE_DIGEST": image.id}
        if model is not None and _is_folder(model):
            source = Path(model).expanduser().resolve()
            mounts = (Mount(source, _MODEL),) if engine.name != "venv" else ()
            argv += ["--model", _MODEL if mounts else str(source)]
        elif model is not None:
            argv += ["--model", model]
            network = "host" if engine.name != "venv" else network
        if network == "none" and (model is None or _is_folder(model)):
            env["HF_HUB_OFFLINE"] = "1"
        target = image.id if engine.name != "venv" else result.reference
        outcome = engine.run(
            target, argv, mounts=mounts, network=network, env=env, fetch=fetch, gpus=gpus, progress=progress
        )
    receipt = _parse_receipt(outcome.fetched)
    if receipt is not None:
        receipt = {**receipt, "image": asked}
        failed = state / f"receipt-{grade}-failed.json"
        _write_receipt(kept if outcome.code == 0 else failed, receipt)
        if outcome.code == 0 and options.output is not None and engine.name == "venv":
            receipts = options.output / "receipts"
            receipts.mkdir(exist_ok=True)
            _write_receipt(receipts / f"{_stamp()}-{grade}.json", receipt)
    if outcome.code != 0:
        raise _proof_error(outcome.code, outcome.output, receipt, image, engine)
    if receipt is None:
        raise EngineError("verify passed but left no receipt", "run it again; if it stays, report it", id="no-receipt")
    return replace(result, receipt=kept, grade=_grade(receipt, grade), proof=receipt, pending=_pending(grade))


def _grade(receipt: dict[str, Any], asked: str) -> Any:
    return receipt.get("grade") if receipt.get("grade") in ("full", "static") else asked


def _pending(grade: str) -> str | None:
    return PENDING if grade == "static" else None


def _proof_error(
    code: int, output: str, receipt: dict[str, Any] | None, image: ImageInfo, engine: Engine
) -> ProofFailedError | OutsideError:
    words = [line for line in output.splitlines() if line.strip()]
    said = next(
        (line for line in reversed(words) if "error:" in line or "fail" in line.lower()), words[-1] if words else ""
    )
    where = f"what was built is kept without a name: {image.id}" if engine.name != "venv" else ""
    if code == 3:
        return OutsideError(f"the proof could not be run: {said.strip()[:400]}", where, id="proof-outside")
    return ProofFailedError(f"the environment was built and does not pass: {said.strip()[:400]}", where)


def _parse_receipt(data: bytes | None) -> dict[str, Any] | None:
    if data is None:
        return None
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _read_receipt(path: Path) -> dict[str, Any] | None:
    try:
        return _parse_receipt(path.read_bytes())
    except OSError:
        return None


def _write_receipt(path: Path, receipt: Mapping[str, Any]) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(receipt, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def describe(plan: Plan, lock: LockLike, engine: str) -> str:
    """One line for the person who waits: what is about to be built."""
    return f"{engine}: python {plan.python}, torch {torch_version(plan, lock)}, {len(plan.pins)} pinned packages"
