"""envforge verify: prove an environment: it loads a model, chats, trains, and keeps what it trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

GRACE = 5.0  # seconds that a proof gets to notice a signal by itself
# Files that a built environment folder holds beside its environment, and the option each answers.
_BESIDE = (("plan.json", "--plan"), ("requirements.txt", "--lock"), ("verify.json", "--settings"))
_SMALL = "small"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify)


def verify(
    folder: Annotated[
        Path | None, typer.Argument(help="Built environment folder: its Python, plan, lock and settings are used.")
    ] = None,
    env: Annotated[Path | None, typer.Option("--env", help="Prefix of a virtual or conda environment.")] = None,
    python: Annotated[Path | None, typer.Option("--python", help="Interpreter of the environment.")] = None,
    model: Annotated[
        str, typer.Option(help="Folder, hub id (hf:OWNER/NAME@REVISION, OWNER/NAME), or the word small.")
    ] = _SMALL,
    gguf: Annotated[Path | None, typer.Option(help="A GGUF file in place of a model.")] = None,
    grade: Annotated[str, typer.Option(help="auto, static (needs no device) or full (on the plan's device).")] = "auto",
    plan: Annotated[Path | None, typer.Option(help="plan.json to compare with.")] = None,
    lock: Annotated[Path | None, typer.Option(help="requirements.txt of the lock to compare with.")] = None,
    settings: Annotated[Path | None, typer.Option(help="JSON with defaults for the proof's options.")] = None,
    stack: Annotated[str | None, typer.Option(help="transformers, unsloth or xtuner.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="LoRA steps (8).")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Cap in tokens (1024).")] = None,
    accumulation: Annotated[int | None, typer.Option(min=1, help="Micro-batches of a step (8; 2 on a CPU).")] = None,
    data: Annotated[Path | None, typer.Option(help="Your own .jsonl or .txt: a report of its lengths.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What the model is asked.")] = None,
    expect: Annotated[str | None, typer.Option(help="A word that the answers must hold.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Comma-separated: environment,data,chat,training,distributed,effect.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the distributed layer (one for each GPU, from two on).")
    ] = None,
    limit: Annotated[list[str] | None, typer.Option(help="LAYER=SECONDS, may be repeated.")] = None,
    memory_limit: Annotated[int | None, typer.Option(min=1, help="MiB for the processes of a layer.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Run later layers after a failure.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write a page for people: FILE.html or FILE.png.")] = None,
    receipt: Annotated[Path | None, typer.Option(help="Prove nothing: report and explain this receipt.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Prove nothing: compare two receipts.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the logs of the stages in this folder.")] = None,
    json_: Annotated[str | None, typer.Option("--json", help="Write the receipt to this file; - is stdout.")] = None,
) -> None:
    """Prove an environment in layers: environment, data, chat, training, distributed, effect.

    Exit code 1: it does not pass, and the first layer and check that failed are named, with what the diagnosis finds in
    its logs; 3: the model cannot be had.
    """
    import os
    import tempfile

    check_places(json_, report)
    if compare is not None:
        show_comparison(*compare, json_)
        return
    if receipt is not None:
        show(read(receipt), json_, report)
        return
    interpreter = choose_python(folder, env, python)
    files = {"--plan": plan, "--lock": lock, "--settings": settings, "--data": data, "--logs": logs, "--gguf": gguf}
    arguments = ["--grade", grade, *beside(folder, [option for option, value in files.items() if value is not None])]
    for option, value in {
        **{option: value.absolute() if value is not None else None for option, value in files.items()},
        "--stack": stack,
        "--steps": steps,
        "--max-length": max_length,
        "--accumulation": accumulation,
        "--prompt": prompt,
        "--expect": expect,
        "--layers": layers,
        "--memory-limit": memory_limit,
        "--processes": processes,
    }.items():
        if value is not None:
            arguments += [option, str(value)]
    for item in limit or ():
        arguments += ["--limit", item]
    arguments += ["--trust-remote-code"] * trust_remote_code + ["--keep-going"] * keep_going
    if gguf is None and grade != "static":
        arguments += model_arguments(model, interpreter)
    with tempfile.TemporaryDirectory(prefix="envforge-receipt-") as place:
        made = Path(place) / "receipt.json"
        code = run_proof(interpreter, [*arguments, "--quiet", "--raw", "--json", str(made)], dict(os.environ))
        if made.is_file():
            show(read(made), json_, report)
    if code:
        raise typer.Exit(code)


def check_places(json_: str | None, report: Path | None) -> None:
    """Raises:
    UsageError: the receipt or its page cannot be written; said before the work is done.
    """
    from envforge.errors import UsageError
    from envforge.verify.page import check_page
    from envforge.verify.receipt import place_fault

    try:
        if report is not None:
            check_page(report)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for place in (report, None if json_ in (None, "-") else Path(str(json_))):
        if place is not None and (fault := place_fault(place)):
            raise UsageError(fault, "name a file in a folder that can be written")


def read(path: Path) -> dict[str, Any]:
    """A receipt from disk.

    Raises:
        UsageError: it is none.
    """
    from envforge.errors import UsageError
    from envforge.verify.compare import read_receipt

    try:
        return read_receipt(path)
    except ValueError as error:
        raise UsageError(str(error)) from error


def show(receipt: dict[str, Any], json_: str | None, report: Path | None) -> None:
    """Explain a receipt that failed, write it and its page where that was asked, and print the report.

    Raises:
        Exit: 1 when it did not pass.
    """
    from envforge.cli.findings import explain
    from envforge.verify.page import write_page
    from envforge.verify.receipt import dumps, public, write_atomic
    from envforge.verify.report import render

    receipt = explain(receipt)
    told = public(receipt)
    if json_ is not None and json_ != "-":
        write_atomic(Path(json_), told)
    if report is not None:
        write_page(report, told)
    typer.echo(dumps(told) if json_ == "-" else render(receipt))
    if not receipt["passed"]:
        raise typer.Exit(1)


def show_comparison(one: Path, two: Path, json_: str | None) -> None:
    """Print what differs between two receipts."""
    from envforge.verify.compare import compare, render
    from envforge.verify.receipt import dumps, write_atomic

    found = compare(read(one), read(two))
    if json_ is not None and json_ != "-":
        write_atomic(Path(json_), found)
    typer.echo(dumps(found) if json_ == "-" else render(found, (str(one), str(two))))


def choose_python(folder: Path | None, env: Path | None, python: Path | None) -> Path:
    """The interpreter whose environment is proven.

    Raises:
        UsageError: two were named, or what was named holds no interpreter.
    """
    from envforge.errors import UsageError

    named = [item for item in (folder, env, python) if item is not None]
    if len(named) > 1:
        raise UsageError("name one environment: a folder, --env or --python")
    if not named:
        return Path(sys.executable)
    if python is not None:
        candidates = [python]
    elif env is not None:
        candidates = [env / "bin" / "python", env / "bin" / "python3"]
    else:
        candidates = [named[0] / "env" / "bin" / "python"]
    for path in candidates:
        if path.is_file():
            return path.absolute()
    raise UsageError(f"there is no {candidates[0]}", "name the prefix of an environment, or its interpreter")


def beside(folder: Path | None, given: Sequence[str]) -> list[str]:
    """The plan, lock and settings of a built folder, where the user named no others."""
    if folder is None:
        return []
    found: list[str] = []
    for name, option in _BESIDE:
        if (folder / name).is_file() and option not in given:
            found += [option, str((folder / name).absolute())]
    return found


def model_arguments(model: str, python: Path) -> list[str]:
    """`--model` (and `--revision`) for the proof; makes the small model where it is asked for."""
    from envforge.errors import UsageError

    if model == _SMALL:
        from envforge.cli.model import make_small
        from envforge.models import default_folder

        return ["--model", str(make_small(default_folder(), python))]
    if Path(model).is_dir():
        return ["--model", str(Path(model).absolute())]
    hub, _, rest = model.rpartition(":")
    if hub == "ms":
        raise UsageError(
            "the proof loads hub ids from Hugging Face only", f"fetch it first: envforge model fetch {model} DIR"
        )
    name, _, revision = rest.partition("@")
    return ["--model", name, *(["--revision", revision] if revision else [])]


def run_proof(python: Path, arguments: list[str], environment: dict[str, str]) -> int:
    """Run the proof with a copy of its code on the path, so that nothing else of envforge is in sight there.

    Raises:
        OutsideError: the interpreter cannot be started, or was ended by a signal.
    """
    import shutil
    import subprocess
    import tempfile

    from envforge.errors import OutsideError

    source = Path(__file__).resolve().parents[1] / "verify"
    with tempfile.TemporaryDirectory(prefix="envforge-proof-") as scratch:
        package = Path(scratch) / "envforge"
        shutil.copytree(source, package / "verify", ignore=shutil.ignore_patterns("__pycache__"))
        (package / "__init__.py").write_text("", encoding="utf-8")
        environment = {**environment, "PYTHONPATH": scratch, "PYTHONNOUSERSITE": "1"}
        environment.pop("PYTHONHOME", None)
        try:
            process = subprocess.Popen([str(python), "-m", "envforge.verify", *arguments], env=environment)
        except OSError as error:
            raise OutsideError(f"cannot run {python}: {error.strerror}") from error
        code, stop = None, None
        while code is None:
            try:
                code = process.wait(GRACE if stop else None)
            except (KeyboardInterrupt, SystemExit) as signalled:
                # Where the proof got the same signal, it ends its stage and removes its scratch folder, then we go.
                stop = signalled
            except subprocess.TimeoutExpired:
                process.terminate()  # the signal was for us alone
    if isinstance(stop, SystemExit):
        raise stop
    if code < 0:
        raise OutsideError(f"the proof was ended by signal {-code}")
    return code
