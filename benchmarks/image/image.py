"""An image by envforge against the usual Dockerfile: size, rebuild after a change, an unchanged build, a second stack.

Both stand on the same base, install the same pins for the CPU and download from the same index on loopback, which serves
wheels that were fetched once before. "Usual" is one `pip install --no-cache-dir -r requirements.txt` in a virtual
environment (without that option pip keeps 311 MB of downloads more). Times are of whole commands: `docker build` there,
`envforge build --no-verify` here, with resolving and locking.

    python tests/engine/engine_daemon.py &           # a private engine with a base image; or any engine with python3-venv
    export DOCKER_HOST=...
    python benchmarks/image/image.py WORK --base envforge-test/base:bookworm

Each step is kept in WORK/steps.json when it is done, so a run that was stopped goes on (`--again STEP` repeats one). WORK
takes about 1 GB, the engine about 8 GB. The engine's builder cache is not touched; "usual" builds with --no-cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import tomllib

NAMES = {"first": "bench-first", "changed": "bench-first", "second": "bench-second"}
STACK = ("torch==2.13.0", "transformers", "peft", "accelerate", "datasets")
# A pure-Python package that everything uses and that no plan is dated by: exactly one pin moves.
REQUESTS = {
    "first": (*STACK, "tqdm==4.67.1"),
    "changed": (*STACK, "tqdm==4.67.0"),
    "second": (*STACK, "tqdm==4.67.1", "trl"),
}
GOALS = {"size": 0.75, "rebuild": 0.25, "unchanged": 0.05, "second": 0.35}
USUAL = """FROM {base}
COPY requirements.txt /tmp/requirements.txt
RUN python3 -m venv /opt/env && /opt/env/bin/pip install --no-cache-dir --no-deps --index-url {index} -r /tmp/requirements.txt
ENV PATH=/opt/env/bin:$PATH
"""


class Bench:
    """The folder of one run, and its finished steps."""

    def __init__(self, work: Path, base: str, again: list[str]) -> None:
        self.work, self.base = work, base
        self.steps: dict[str, Any] = {}
        if (work / "steps.json").is_file():
            self.steps = json.loads((work / "steps.json").read_text())
        for name in again:
            self.steps.pop(name, None)

    def step(self, name: str, do: Callable[[], Any]) -> Any:
        """Do a step once."""
        if name not in self.steps:
            print(f"{name} ...", file=sys.stderr, flush=True)
            self.steps[name] = do()
            (self.work / "steps.json").write_text(json.dumps(self.steps, indent=1) + "\n")
        return self.steps[name]


def envforge(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    argv = [sys.executable, "-c", "from envforge.cli import main; main()", *words]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    if done.returncode != 0:
        raise SystemExit(f"envforge {' '.join(words)} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    return done


def make_projects(bench: Bench) -> dict[str, Any]:
    """The three projects with their plans and locks, made once from the configured index."""
    return {name: _project(bench.work / name, NAMES[name], requests) for name, requests in REQUESTS.items()}


def _project(folder: Path, name: str, requests: tuple[str, ...]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"  - {request}\n" for request in requests)
    (folder / "image.yaml").write_text(f"schema: 1\nname: {name}\nrequests:\n{lines}")
    envforge("resolve", str(folder), "--driver", "none", "--python", "3.11")
    return {"pins": json.loads((folder / "plan.json").read_text())["pins"]}


def fill_pool(bench: Bench) -> dict[str, Any]:
    """Every wheel of the three locks in one folder."""
    pool = bench.work / "pool"
    pool.mkdir(exist_ok=True)
    for name in NAMES:
        bundle = bench.work / f"bundle-{name}"
        envforge("bundle", str(bench.work / name), str(bundle), "--engine", "venv", "--model", "none")
        for wheel in (bundle / "wheels").glob("*.whl"):
            target = pool / wheel.name
            if not target.exists():
                os.link(wheel, target)
    return {"wheels": len(list(pool.glob("*.whl"))), "bytes": sum(p.stat().st_size for p in pool.glob("*.whl"))}


@contextmanager
def index(pool: Path) -> Iterator[str]:
    """A package index (PEP 691, 658, 700) over a folder of wheels, on loopback; upload times are those of the locks."""
    times: dict[str, str] = {}
    for lock in pool.parent.glob("bundle-*/project/pylock.toml"):
        for package in tomllib.loads(lock.read_text())["packages"]:
            for wheel in package.get("wheels", ()):
                if "upload-time" in wheel:
                    times[wheel["url"].rpartition("/")[2]] = wheel["upload-time"].strftime("%Y-%m-%dT%H:%M:%SZ")
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(pool.glob("*.whl")):
        name = re.sub(r"[-_.]+", "-", path.name.split("-")[0]).lower()
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        rows.setdefault(name, []).append(
            {
                "filename": path.name,
                "url": f"/{path.name.replace('+', '%2B')}",
                "hashes": {"sha256": digest},
                "size": path.stat().st_size,
                "core-metadata": True,
                "upload-time": times.get(path.name, "2026-01-01T00:00:00Z"),
            }
        )

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, directory=str(pool), **more)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.replace("%2B", "+")
            if path.startswith("/simple/"):
                name = path.split("/")[2]
                page = {"meta": {"api-version": "1.1"}, "name": name, "files": rows.get(name, [])}
                kind = "application/vnd.pypi.simple.v1+json"
                self.text(json.dumps(page).encode() if name in rows else b"", kind)
            elif path.endswith(".metadata"):
                with zipfile.ZipFile(pool / path[1:].removesuffix(".metadata")) as wheel:
                    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
                    self.text(wheel.read(name), "text/plain")
            elif spread := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
                data = (pool / path[1:]).read_bytes()
                start = int(spread[1]) if spread[1] else max(0, len(data) - int(spread[2]))
                end = min(int(spread[2]) + 1 if spread[1] and spread[2] else len(data), len(data))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
                self.send_header("Content-Length", str(end - start))
                self.end_headers()
                self.wfile.write(data[start:end])
            else:
                super().do_GET()

        def text(self, data: bytes, kind: str) -> None:
            self.send_response(200 if data else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # clients that read the end of a file only hang up

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()


def usual(bench: Bench, name: str, url: str) -> dict[str, Any]:
    """The usual Dockerfile of a project's pins."""
    import docker

    folder = bench.work / "usual"
    folder.mkdir(exist_ok=True)
    pins = (bench.work / name / "requirements.txt").read_text()
    (folder / "requirements.txt").write_text(re.sub(r"(?m)^--.*\n", "", pins))
    (folder / "Dockerfile").write_text(USUAL.format(base=bench.base, index=url))
    tag = f"bench-usual:{name}"
    start = time.monotonic()
    argv = [_client(), "build", "--no-cache", "--network=host", "-q", "-t", tag, str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "DOCKER_BUILDKIT": "1"})
    if done.returncode != 0:
        raise SystemExit(f"the usual build failed:\n{done.stderr[-3000:]}")
    seconds = time.monotonic() - start
    return {"seconds": round(seconds, 1), "bytes": docker.from_env().images.get(tag).attrs["Size"]}


def _client() -> str:
    from envforge.image.engines.dockercli import find_client

    return str(find_client().path)


def ours(bench: Bench, name: str, url: str) -> dict[str, Any]:
    """The same pins by envforge, from the command line."""
    import docker

    env = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "XDG_STATE_HOME": str(bench.work / "state")}
    words = ["build", str(bench.work / name), "--driver", "none", "--python", "3.11", "--engine", "docker"]
    words += ["--base", bench.base, "--mirror", f"index={url}", "--no-verify", "--json"]
    argv = [sys.executable, "-c", "from envforge.cli import main; main()", *words]
    start = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    seconds = time.monotonic() - start
    if done.returncode != 0:
        raise SystemExit(f"envforge build failed ({done.returncode}):\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout)
    image = docker.from_env().images.get(result["reference"])
    told = re.search(r"([\d,]+) MB to download, (?:about )?([\d,]+) MB when it is done", done.stderr)
    sizes = [row["Size"] for row in reversed(image.history()) if row["Size"]]
    return {
        "seconds": round(seconds, 1),
        "bytes": image.attrs["Size"],
        "layers": image.attrs["RootFS"]["Layers"],
        "layer_bytes": sizes,
        "reused": result["reused"],
        "predicted_mb": [int(word.replace(",", "")) for word in told.groups()] if told else None,
        "stages": [line for line in done.stderr.splitlines() if line.startswith("[")],
    }


def new_bytes(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Bytes of the second image's layers that the first has not got."""
    shared = 0
    for a, b in zip(first["layers"], second["layers"], strict=False):
        if a != b:
            break
        shared += 1
    # Layers without bytes (the working folder's) come last, so rows with bytes stand beside the layers from the first.
    return int(sum(second["layer_bytes"][shared:]))


def main() -> int:
    """Run all steps; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--again", action="append", default=[])
    parser.add_argument("--until", default="", help="stop after this step")
    parser.add_argument("-o", "--output", type=Path, help="write the figures there")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.work.resolve(), args.base, args.again)
    bench.step("projects", lambda: make_projects(bench))
    bench.step("pool", lambda: fill_pool(bench))
    with index(bench.work / "pool") as url:
        work: list[tuple[str, Callable[[], Any]]] = [
            ("usual", lambda: usual(bench, "first", url)),
            ("ours", lambda: ours(bench, "first", url)),
            ("ours-unchanged", lambda: ours(bench, "first", url)),
            ("ours-changed", lambda: ours(bench, "changed", url)),
            ("usual-changed", lambda: usual(bench, "changed", url)),
            ("ours-second", lambda: ours(bench, "second", url)),
        ]
        for name, do in work:
            bench.step(name, do)
            if name == args.until:
                return 0
    figures = report(bench.steps)
    print(json.dumps(figures, indent=1))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(row["met"] for row in figures["goals"].values()) else 1


def report(steps: dict[str, Any]) -> dict[str, Any]:
    """The ratios against their goals, with what they are made of."""
    one, mine = steps["usual"], steps["ours"]
    changed, plain = steps["ours-changed"], steps["usual-changed"]
    ratios = {
        "size": mine["bytes"] / one["bytes"],
        "rebuild": changed["seconds"] / plain["seconds"],
        "unchanged": steps["ours-unchanged"]["seconds"] / one["seconds"],
        "second": new_bytes(mine, steps["ours-second"]) / steps["ours-second"]["bytes"],
    }
    predicted = mine["predicted_mb"]
    return {
        "goals": {
            name: {"ratio": round(value, 3), "goal": GOALS[name], "met": value <= GOALS[name]}
            for name, value in ratios.items()
        },
        "predicted_size": round(predicted[1] * 1e6 / mine["bytes"], 3) if predicted else None,
        "seconds": {name: row["seconds"] for name, row in steps.items() if "seconds" in row},
        "bytes": {name: row["bytes"] for name, row in steps.items() if "seconds" in row},
    }


if __name__ == "__main__":
    sys.exit(main())
