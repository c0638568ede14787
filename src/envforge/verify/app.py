"""Arguments, the run, the receipt, the exit code: 0 passed, 1 failed, 2 bad usage, 3 the model cannot be had."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from envforge.verify.compare import compare, read_receipt
from envforge.verify.compare import render as render_comparison
from envforge.verify.explain import findings_here
from envforge.verify.models import ModelMissingError, find_model, known_answer, marker
from envforge.verify.page import check_page, write_page
from envforge.verify.receipt import dumps, make_receipt, place_fault, public, write_atomic
from envforge.verify.record import LAYERS, progress
from envforge.verify.report import render
from envforge.verify.settings import LIMITS, PROMPT, Settings, read_plan
from envforge.verify.stage import TARGETS
from envforge.verify.supervise import Layer, run_layers, skipped

EXIT_FAILED, EXIT_USAGE, EXIT_MODEL = 1, 2, 3
STACKS = ("transformers", "unsloth", "xtuner")


def parser() -> argparse.ArgumentParser:
    """The options; defaults may come from a JSON file given with --settings (the `verify` part of a spec)."""
    make = argparse.ArgumentParser(
        prog="python -m envforge.verify",
        description="Proves that this environment loads a model, chats, trains, and keeps what it trained.",
    )
    add = make.add_argument
    add("--plan", type=Path, help="plan.json: pins, torch build and device are compared with it")
    add("--lock", type=Path, help="requirements.txt of the lock: every line of it must be installed exactly")
    add("--model", help="folder or hub id (default: ENVFORGE_MODEL)")
    add("--revision", help="revision of a hub id")
    add("--gguf", help="a GGUF file instead of --model")
    add("--stack", choices=STACKS, default="transformers")
    add("--steps", type=positive, default=8, help="LoRA steps (default 8)")
    add("--max-length", type=positive, default=1024, help="cap in tokens (default 1024)")
    add("--batch-size", type=positive, default=1)
    add("--accumulation", type=positive, help="micro-batches of a step (default 8 on a GPU, 2 on the CPU)")
    add("--learning-rate", type=float, default=2e-4)
    add("--max-grad-norm", type=float, default=1.0)
    add("--precision", choices=("auto", "bf16", "fp16", "fp32"), default="auto")
    add("--data", help="your own .jsonl or .txt: a report of its lengths with a suggested cap")
    add("--prompt", default=PROMPT)
    add("--expect", help="a word that the answer must hold (default: what the model is known to say)")
    add("--max-new-tokens", type=positive, default=32)
    add("--no-four-bit", action="store_true", help="leave out the 4-bit chat")
    add("--processes", type=positive, help="ranks of the distributed layer (default: one for each GPU, from two on)")
    add("--trust-remote-code", action="store_true", help="run the model's own Python files (only with a pinned model)")
    add("--grade", choices=("auto", "static", "full"), default="auto")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--layers", help=f"comma-separated, of {','.join(LAYERS)}")
    add("--keep-going", action="store_true", help="run later layers after one has failed")
    add("--limit", action="append", default=[], metavar="LAYER=SECONDS", help="time limit of a layer")
    add("--memory-limit", type=positive, metavar="MIB", help="memory limit of a layer's processes")
    add("--settings", type=Path, help="JSON with defaults for these options (names with _ for -)")
    add("--json", dest="json_file", metavar="FILE", help="write the receipt here; - is stdout, without the report")
    add("--report", type=Path, metavar="FILE", help="write a page for people: .html, or .png where Pillow is installed")
    add("--receipt", type=Path, metavar="FILE", help="prove nothing: report this receipt (with --report, --json)")
    add("--compare", type=Path, nargs=2, metavar=("A", "B"), help="prove nothing: compare two receipts")
    add("--logs", type=Path, help="keep the logs of the stages in this folder")
    add("--raw", action="store_true", help="leave the paths of this machine in the receipt, for a caller on it")
    add("--quiet", action="store_true", help="no report on stdout")
    return make


def positive(text: str) -> int:
    """An integer of at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def setting_names(make: argparse.ArgumentParser) -> set[str]:
    """What a settings file may set."""
    return {action.dest for action in make._actions}


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    make = parser()
    first, _ = make.parse_known_args(argv)
    if first.settings:
        try:
            defaults = json.loads(first.settings.read_text(encoding="utf-8"))
            unknown = sorted(set(defaults) - setting_names(make))
            if unknown:
                raise ValueError(f"unknown option {unknown[0]}")
        except (OSError, ValueError, TypeError) as error:
            return stop(EXIT_USAGE, f"{first.settings}: {error}")
        make.set_defaults(**defaults)
    options = make.parse_args(argv)
    try:
        if options.report:
            check_page(options.report)
        for place in (options.report, options.json_file):
            if place and str(place) != "-" and (fault := place_fault(Path(place))):
                return stop(EXIT_USAGE, fault)
        if options.compare:
            return compare_two(options.compare, options.json_file)
        if options.receipt:
            return tell(read_receipt(options.receipt), options)
    except ValueError as error:
        return stop(EXIT_USAGE, str(error))
    scratch = Path(tempfile.mkdtemp(prefix="envforge-verify-"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, interrupt)
    try:
        return run(options, scratch)
    except KeyboardInterrupt:
        progress("error: interrupted; no receipt was written")
        return 130
    finally:
        if options.logs:
            keep_logs(scratch, options.logs)
        shutil.rmtree(scratch, ignore_errors=True)


def interrupt(number: int, frame: Any) -> None:
    """SIGTERM and SIGHUP end a run as Ctrl-C does: the stage is ended and the scratch folder removed."""
    raise KeyboardInterrupt


def stop(code: int, cause: str, hint: str = "") -> int:
    """Say why, and give the code back."""
    progress(f"error: {cause}" + (f"\n\nhint: {hint}" if hint else ""))
    return code


def run(options: argparse.Namespace, scratch: Path) -> int:
    """Everything between the arguments and the exit code."""
    started, clock = time.time(), time.monotonic()
    try:
        settings = make_settings(options, scratch)
        wanted = chosen_layers(options, settings)
    except ValueError as error:
        return stop(EXIT_USAGE, str(error))
    needs_model = settings.grade == "full" and any(name in wanted for name in LAYERS[1:])
    if needs_model or options.model or options.gguf:
        name = options.model or os.environ.get("ENVFORGE_MODEL") or ""
        if not name and not options.gguf:
            return stop(
                EXIT_MODEL,
                "no model was given: chat, training and effect need one",
                "--model DIR (envforge model small DIR makes a small one), or --grade static",
            )
        if options.trust_remote_code and not options.revision and not Path(name).is_dir():
            return stop(EXIT_USAGE, "remote code is run only from a pinned revision", "--revision COMMIT, or a folder")
        try:
            folder = find_model(name, options.revision, scratch, options.gguf)
        except ModelMissingError as error:
            return stop(EXIT_MODEL, str(error))
        settings.model = str(folder)
        settings.model_id = Path(options.gguf or name).name if options.gguf or Path(name).is_dir() else name
        settings.model_id = str(marker(folder).get("source") or settings.model_id)
        if options.expect is None:
            settings.expect = known_answer(folder, settings.prompt)
    layers = prove(settings, wanted, options.keep_going)
    receipt = make_receipt(settings, layers, started, time.monotonic() - clock)
    if not receipt["passed"]:
        receipt["findings"] = findings_here(receipt)
    return tell(receipt, options)


def tell(receipt: dict[str, Any], options: argparse.Namespace) -> int:
    """The receipt to where it was asked for, the report (with the real paths) to stdout; -> the exit code."""
    told = receipt if options.raw else public(receipt)
    if options.json_file == "-":
        print(dumps(told), flush=True)
    elif options.json_file:
        write_atomic(Path(options.json_file), told)
    if options.report:
        write_page(options.report, told)
    if not options.quiet and options.json_file != "-":
        print(render(receipt), flush=True)
    return 0 if receipt["passed"] else EXIT_FAILED


def compare_two(paths: list[Path], json_file: str | None) -> int:
    """Print what differs; 0 whatever it is.

    Raises:
        ValueError: one is not a receipt.
    """
    found = compare(read_receipt(paths[0]), read_receipt(paths[1]))
    if json_file and json_file != "-":
        write_atomic(Path(json_file), found)
    print(dumps(found) if json_file == "-" else render_comparison(found, (str(paths[0]), str(paths[1]))), flush=True)
    return 0


def make_settings(options: argparse.Namespace, scratch: Path) -> Settings:
    """Options -> settings; finds the device and the grade.

    Raises:
        ValueError: a plan that is none, or a limit that cannot be read.
    """
    plan = plan_hash = None
    if options.plan:
        plan, plan_hash = read_plan(options.plan)
    limits = dict(LIMITS)
    for item in options.limit:
        layer, _, seconds = item.partition("=")
        if layer not in LAYERS:
            raise ValueError(f"--limit {item}: no such layer; known: {', '.join(LAYERS)}")
        limits[layer] = float(seconds)
    lock_hash = os.environ.get("ENVFORGE_LOCK_HASH") or None
    if options.lock:
        if not options.lock.is_file():
            raise ValueError(f"{options.lock} is not there")
        lock_hash = hashlib.sha256(options.lock.read_bytes()).hexdigest()
    settings = Settings(
        workdir=str(scratch),
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        stack=options.stack,
        plan=plan,
        plan_hash=plan_hash,
        lock=str(options.lock.resolve()) if options.lock else None,
        lock_hash=lock_hash,
        data=str(Path(options.data).resolve()) if options.data else None,
        prompt=options.prompt,
        expect=options.expect or "",
        max_new_tokens=options.max_new_tokens,
        steps=options.steps,
        max_length=options.max_length,
        batch_size=options.batch_size,
        accumulation=options.accumulation,
        learning_rate=options.learning_rate,
        max_grad_norm=options.max_grad_norm,
        precision=options.precision,
        four_bit=not options.no_four_bit,
        limits=limits,
        memory_limit_mib=options.memory_limit,
    )
    torch = probe_torch()
    settings.device, settings.grade = device_and_grade(options.device, options.grade, plan, torch)
    settings.processes = options.processes or (int(torch.get("count", 1)) if settings.device == "cuda" else 1)
    if settings.device == "cuda" and settings.processes > torch.get("count", 1):
        raise ValueError(f"--processes {settings.processes}: each wants a GPU, torch sees {torch.get('count', 1)}")
    return settings


def probe_torch() -> dict[str, Any]:
    """Whether torch is a CUDA build and sees a GPU; {} when torch does not import.

    A CUDA build is asked in a process of its own. A build without CUDA says so in its version.py, and that is read:
    importing torch takes seconds.
    """
    import subprocess

    if cuda_in_file() == "None":
        return {"cuda": None, "usable": False}
    code = "import json, torch; print(json.dumps([torch.version.cuda, torch.cuda.is_available(), count()]))"
    code = "count = lambda: torch.cuda.device_count()\n" + code
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMITS["environment"], check=False
        )
        cuda, usable, count = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return {}
    return {"cuda": cuda, "usable": bool(usable), "count": int(count)}


def cuda_in_file() -> str | None:
    """What torch's version.py says of its CUDA ("None", "'12.6'"), None when it is not there or says nothing."""
    import importlib.util
    import re

    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*(\S+)", text, re.MULTILINE)
    return match.group(1) if match else None


def device_and_grade(device: str, grade: str, plan: dict[str, Any] | None, torch: dict[str, Any]) -> tuple[str, str]:
    """-> (cpu or cuda, static or full). `auto` grade is full where the plan's device is there, else static."""
    usable = bool(torch.get("usable"))
    wants_gpu = plan["variant"] != "cpu" if plan else torch.get("cuda") is not None
    if device == "auto":
        device = "cuda" if usable and wants_gpu else "cpu"
    if grade == "auto":
        grade = "static" if wants_gpu and device != "cuda" else "full"
    return device, grade


def chosen_layers(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Names in their order.

    Raises:
        ValueError: an unknown layer.
    """
    if not options.layers:
        return [name for name in LAYERS if name in TARGETS]
    asked = [name.strip() for name in options.layers.split(",") if name.strip()]
    for name in asked:
        if name not in TARGETS:
            raise ValueError(f"--layers: no layer {name!r}; known: {', '.join(TARGETS)}")
    return [name for name in LAYERS if name in asked]


def prove(settings: Settings, wanted: list[str], keep_going: bool) -> list[Layer]:
    """The layers of a full proof, or the one that a static proof is made of; what is left out says why."""
    out: dict[str, str] = {}
    if settings.grade == "static":
        out = {name: "a static proof needs no device and runs no model" for name in wanted if name != "environment"}
    elif settings.processes < 2:
        out = {"distributed": "one process has nobody to meet: --processes 2 runs it (by itself with two GPUs)"}
    done = {layer.name: layer for layer in run_layers([n for n in wanted if n not in out], settings, keep_going)}
    return [done[name] if name in done else skipped(name, out[name]) for name in wanted]


def keep_logs(scratch: Path, folder: Path) -> None:
    """Copy logs, events and settings of every stage out of the scratch folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        if path.is_file():
            shutil.copy(str(path), str(folder / path.name))
