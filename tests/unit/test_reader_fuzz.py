"""Whatever stands in requests, requirement files, host files and fleet files: a value or one clear message.

`ENVFORGE_FUZZ=20000 pytest tests/unit/test_reader_fuzz.py` runs as many examples of each.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envforge.cli.target import Targets
from envforge.errors import EnvforgeError
from envforge.intake import read_intake, read_requirements
from envforge.inventory import read_inventory
from envforge.resolver.hosts import parse_host
from envforge.resolver.request import parse_request

runs = settings(
    max_examples=int(os.environ.get("ENVFORGE_FUZZ", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
WORDS = """torch == >= < ~= != === , ; [ ] ( ) @ \\ # +cu126 2.6.0 1!2 * git+https://h/r file:///tmp/x ./x -r -c -e
    --hash=sha256:0 --index-url python_version '3.8' " and or extra é ． dev0 rc1 post .. $(x) %"""
_words = st.sampled_from([*WORDS.split(), " ", "\n", "\t", "\x00", "\u2028"])
lines = st.lists(_words | st.text(max_size=6), max_size=14).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.just("550.54.15"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
hosts = st.fixed_dictionaries(
    {
        "schema": st.just(1),
        "gpus": values | st.lists(st.dictionaries(st.sampled_from(["name", "sm", "memory_mib", "mig"]), values)),
        "driver": values,
    },
    optional=dict.fromkeys(
        ("name", "glibc", "arch", "labels", "cuda_max", "python", "os", "source", "problems"), values
    ),
)
fleets = st.lists(
    st.dictionaries(
        st.sampled_from(["name", "driver", "gpus", "count", "glibc", "arch", "labels", "x"]), values, max_size=6
    ),
    max_size=3,
)


def told(error: EnvforgeError) -> None:
    assert error.exit_code == 2 and error.cause and len(error.cause) < 20_000


@runs
@given(lines)
def test_requests(line: str) -> None:
    try:
        request = parse_request(line)
    except EnvforgeError as error:
        told(error)
        return
    assert request.name and request.text


@runs
@given(lines)
def test_words(word: str) -> None:
    try:
        read_intake([word], [], None)
    except EnvforgeError as error:
        told(error)


@runs
@given(st.lists(lines, max_size=6).map("\n".join) | st.binary(max_size=80))
def test_requirement_files(text: str | bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requirements.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        try:
            read_requirements(path)
        except EnvforgeError as error:
            told(error)


@runs
@given(lines | st.binary(max_size=60))
def test_pyproject_files(text: str | bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pyproject.toml"
        body = text if isinstance(text, bytes) else b"[project]\ndependencies = [" + json.dumps(text).encode() + b"]\n"
        path.write_bytes(body)
        try:
            read_requirements(path)
        except EnvforgeError as error:
            told(error)


@runs
@given(values | hosts)
def test_host_files(data: Any) -> None:
    try:
        host = parse_host(data, "host.json")
    except EnvforgeError as error:
        told(error)
        return
    assert host.arch in ("x86_64", "aarch64")


@runs
@given(fleets.map(lambda rows: json.dumps(rows, allow_nan=True)) | lines | st.binary(max_size=80))
def test_fleet_files(text: str | bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fleet.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        try:
            Targets(fleet=path).read()
        except EnvforgeError as error:
            told(error)


@runs
@given(
    st.sampled_from(
        ["NodeName=a Gres=gpu:a100:1 ", "NODELIST GRES\n", "HOSTNAMES GRES AVAIL_FEATURES\n", '{"nodes": ']
    ).flatmap(lambda head: (lines | st.text(max_size=30)).map(lambda text: head + text))
)
def test_cluster_listings(text: str) -> None:
    try:
        read_inventory(text, "nodes")
    except EnvforgeError as error:
        told(error)
