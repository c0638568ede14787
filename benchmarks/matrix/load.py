"""The matrix's own costs: loading what one resolve needs, its size in the wheel, and what an update asks of the index.

    python benchmarks/matrix/load.py [--json FILE] [--repeat N]

- Load: a fresh process each time, warm caches (the second and later runs of a user). As in the command, typer is
  imported first; then the loader is imported and loads the matrix and the release files that a request reaches. Medians
  of both, and of their ratio within a run.
- Size: release files, hand-written rows and evidence, packed as a wheel packs them.
- Requests: an update of one package with one new release, against a stand-in index on the loopback that shows what the
  matrix knows; what is counted is every request.

Exit 1 where a limit is missed: ratio below 1, generated data below 6 MB, one page and one METADATA.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = (["torch"], ["transformers", "peft", "trl"], ["unsloth"], ["xtuner"])
LIMIT_BYTES = 6_000_000

CODE = """
import time; a = time.perf_counter()
import typer
b = time.perf_counter()
from envforge.matrix.load import load_matrix
from envforge.matrix.releases import load_releases
load_matrix()
for name in {names!r}: load_releases(name)
print(b - a, time.perf_counter() - b)
"""


def reached(request: list[str]) -> list[str]:
    """The release files that a resolve of this request reads."""
    from envforge.matrix.load import load_matrix
    from envforge.matrix.releases import Release, load_releases
    from envforge.resolver.hosts import Host
    from envforge.resolver.request import parse_request
    from envforge.resolver.resolve import Wish, resolve

    names: dict[str, None] = {}

    def load(name: str) -> tuple[Release, ...]:
        names[name] = None
        return load_releases(name)

    resolve(load_matrix(), Wish(tuple(map(parse_request, request)), (Host("cpu", None),)), load)
    return [name for name in names if load_releases(name)]


def seconds(code: str) -> list[float]:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split()]


def load_times(repeat: int) -> list[dict[str, Any]]:
    """Medians in seconds for each request."""
    rows = []
    for request in REQUESTS:
        names = reached(request)
        code = CODE.format(names=names)
        seconds(code)  # warm
        runs = [seconds(code) for _ in range(repeat)]
        theirs, ours = (statistics.median(column) for column in zip(*runs, strict=True))
        ratio = statistics.median(own / typer for typer, own in runs)
        rows.append({"request": request, "files": len(names), "load_s": ours, "typer_s": theirs, "ratio": ratio})
    return rows


def sizes() -> dict[str, dict[str, int]]:
    """Bytes as they lie, and packed."""
    found = {}
    for name in ("releases", "data", "evidence", "schema"):
        files = [path for path in (ROOT / "matrix" / name).rglob("*") if path.is_file()]
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in files:
                archive.write(path, path.relative_to(ROOT))
        found[name] = {"bytes": sum(path.stat().st_size for path in files), "packed": len(out.getvalue())}
    return found


def update_requests() -> dict[str, int]:
    """Requests of an update of peft with nothing new, and with one new release."""
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    from harvest_index import FakeIndex, serve

    from envforge.harvest import Index, harvest
    from envforge.lock.settings import PipSettings
    from envforge.matrix.releases import load_releases

    counts = {}
    with serve(FakeIndex()) as fake, tempfile.TemporaryDirectory() as cache:
        for row in load_releases("peft"):
            for tag in row.wheels:
                fake.add("peft", f"peft-{row.version}-{tag}.whl", b"", row.uploaded, python=row.python or None)
        for what in ("nothing new", "one new release"):
            if what != "nothing new":
                fake.release("peft", "99.0", "2030-01-01", ["torch>=2"])
            with Index(PipSettings(index_url=fake.url)) as index:
                harvest("peft", index, cache=Path(cache))
                counts[what] = index.requests_made
    return counts


def main() -> int:
    """Measure, print, and hold against the limits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = {"load": load_times(options.repeat), "size": sizes(), "requests": update_requests()}
    for row in data["load"]:
        print(
            f"load for {' '.join(row['request'])}: {row['load_s'] * 1000:.0f} ms ({row['files']} files), "
            f"typer {row['typer_s'] * 1000:.0f} ms, ratio {row['ratio']:.2f}"
        )
    for name, size in data["size"].items():
        print(f"matrix/{name}: {size['bytes'] / 1e6:.2f} MB, packed {size['packed'] / 1e6:.2f} MB")
    for what, count in data["requests"].items():
        print(f"update of one package, {what}: {count} requests")
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    kept = (
        all(row["ratio"] < 1 for row in data["load"])
        and data["size"]["releases"]["bytes"] < LIMIT_BYTES
        and data["requests"] == {"nothing new": 1, "one new release": 2}
    )
    print("within the limits" if kept else "a limit is missed")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
