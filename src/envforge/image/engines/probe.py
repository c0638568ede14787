"""What a base image has: asked by a shell script inside it, the same for every engine."""

from __future__ import annotations

from envforge.errors import OutsideError
from envforge.image.values import BaseInfo

# Prints what a base has; the version asked for is an argument.
PROBE = """
printf 'python=%s\\n' "$(command -v "python$1" || true)"
for file in /usr/local/bin/python3.[0-9]* /usr/bin/python3.[0-9]*; do
    case $file in *-config | *'*') ;; *) [ -x "$file" ] && printf 'have=%s\\n' "${file##*/python}" ;; esac
done
printf 'glibc=%s\\n' "$(getconf GNU_LIBC_VERSION 2>/dev/null || true)"
if [ -r /etc/os-release ]; then . /etc/os-release; printf 'os=%s%s\\n' "$ID" "$VERSION_ID"; fi
"""


def probe_words(python: str) -> list[str]:
    """The command that looks for a Python version inside; its answer is for `read_probe`."""
    return ["/bin/sh", "-c", PROBE, "sh", python]


def read_probe(ref: str, digest: str, code: int, output: str, *, named: str | None = None) -> BaseInfo:
    """The probe's answer as a base.

    Args:
        named: what FROM shall say, where that is not `ref`.

    Raises:
        OutsideError: there is no shell inside.
    """
    if code != 0:
        raise OutsideError(
            f"the base image {ref} has no working shell: {output.strip()[:200]}",
            "take a Debian or Ubuntu base, such as python:3.11-slim-bookworm",
            id="base",
        )
    facts = [line.partition("=") for line in output.splitlines() if "=" in line]
    return BaseInfo(
        ref=named or ref,
        digest=digest,
        python=next((value for key, _, value in facts if key == "python" and value), None),
        os=next((value for key, _, value in facts if key == "os"), None),
        pythons=tuple(sorted({value for key, _, value in facts if key == "have"})),
        glibc=next((value.removeprefix("glibc ") for key, _, value in facts if key == "glibc" and value), None),
    )
