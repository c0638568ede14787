#!/usr/bin/env python3
"""Shows what the configured package index has that matrix/releases has not, and writes it with --write.

    tools/update_matrix.py transformers peft        what is new for these
    tools/update_matrix.py --all --write            everything, written

The index, certificates and proxy are those of the user's pip (index-url, cert, proxy); nothing of them is written.
Exit codes: 0 done, 2 usage, 3 the index failed for a package (the others are done; its file is untouched).
"""

from __future__ import annotations

import argparse
import difflib
import sys
from datetime import datetime, timezone
from pathlib import Path

from envforge.errors import EnvforgeError
from envforge.harvest import PACKAGES, Index, harvest, news, write
from envforge.lock.settings import read_pip_settings

RELEASES = Path(__file__).resolve().parents[1] / "matrix" / "releases"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", nargs="*", help="packages of the matrix")
    parser.add_argument("--all", action="store_true", help="every package of the matrix")
    parser.add_argument("--write", action="store_true", help="write the files; without it nothing changes")
    parser.add_argument("--refresh", action="store_true", help="read the metadata of known releases again too")
    parser.add_argument("--accept-loss", action="store_true", help="take a harvest that lost known releases")
    parser.add_argument("--folder", type=Path, default=RELEASES, help="where the release files are")
    parser.add_argument("--cache", type=Path, help="folder for metadata read so far (default: the user's cache folder)")
    parser.add_argument("--deadline", type=float, default=1800.0, metavar="SECONDS", help="stop after this long")
    options = parser.parse_args(argv)
    names = list(PACKAGES) if options.all else list(dict.fromkeys(options.package))
    if not names or (options.all and options.package):
        parser.error("name packages, or say --all")
    for name in names:
        if name not in PACKAGES:
            near = difflib.get_close_matches(name, PACKAGES, n=3)
            parser.error(f"{name} is not in the matrix" + (f"; did you mean {' or '.join(near)}?" if near else ""))

    failed = 0
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    try:
        with Index(read_pip_settings(), deadline_s=options.deadline) as index:
            for name in names:
                failed |= _one(name, index, options, today)
    except EnvforgeError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; run it again to go on where it was", file=sys.stderr)
        return 130
    return 3 if failed else 0


def _one(name: str, index: Index, options: argparse.Namespace, today: str) -> bool:
    """One package: prints what is new, writes when asked; True where it failed."""

    def progress(done: int, of: int) -> None:
        print(f"\r{name}: {done} of {of} releases read", end="" if done < of else "\n", file=sys.stderr, flush=True)

    try:
        result = harvest(
            name,
            index,
            folder=options.folder,
            cache=options.cache,
            refresh=options.refresh,
            accept_loss=options.accept_loss,
            progress=progress if sys.stderr.isatty() else None,
        )
        for line in news(name, result.old, result.releases, PACKAGES) or [f"{name}: nothing new"]:
            print(line)
        for note in result.notes:
            print(f"note: {note}", file=sys.stderr)
        if options.write and (path := write(result, today, options.folder)):
            print(f"{name}: {path.name} written ({result.asked} requests)", file=sys.stderr)
    except EnvforgeError as error:
        print(error.render(), file=sys.stderr)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
