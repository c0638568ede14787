"""Answers on the real matrix before a second judge: uv, given the pins alone, finds no conflict in the metadata.

The default index holds one CUDA build of each torch; what torch asks of other packages is the same in all of them.
Releases that are source archives only are left out: uv would run their build code. (`matrix why` judges answers in
tests/unit/test_resolve.py.)
"""

from __future__ import annotations

import itertools
import os
from functools import cache
from pathlib import Path

import pytest

from envforge.lock import index_arguments, python_platform, read_pip_settings, run_uv
from envforge.lock.settings import uv_environment
from envforge.matrix.load import load_matrix
from envforge.matrix.model import Matrix
from envforge.matrix.releases import load_releases
from envforge.resolver.constraints import Options
from envforge.resolver.hosts import known, make_host
from envforge.resolver.plan import Plan
from envforge.resolver.request import parse_request
from envforge.resolver.resolve import Wish, resolve

pytestmark = pytest.mark.index

REQUESTS = (
    "torch transformers peft trl accelerate datasets",
    "unsloth bitsandbytes transformers peft trl",
    "torch==2.1.2 torchvision==0.16.2 torchaudio==2.1.2 transformers==4.36.2 bitsandbytes==0.41.2.post2 xtuner",
    "transformers==4.44.2 peft bitsandbytes liger-kernel",
    "torch torchvision torchaudio transformers==5.3.0 torchao",
    "axolotl",
    "llamafactory",
    "vllm",
    "ms-swift bitsandbytes",
)
HOSTS = {"A100": "535.104.05", "RTX 4090": "580.65.06"}  # taken in turns: half of the requests see each


@cache
def _matrix() -> Matrix:
    return load_matrix()


@pytest.mark.parametrize(("request_", "gpu"), list(zip(REQUESTS, itertools.cycle(HOSTS), strict=False)))
def test_uv_takes_the_pins(request_: str, gpu: str, tmp_path: Path) -> None:
    target = known(make_host("h", HOSTS[gpu], (gpu,), "2.35"), _matrix())
    answer = resolve(_matrix(), Wish(tuple(map(parse_request, request_.split())), (target,), Options(), None))
    if answer.plan is None:
        assert answer.conflict is not None and answer.conflict.fixes
        return
    accepted, words = uv_takes(answer.plan, tmp_path)
    assert accepted, words


def test_uv_refuses_pins_that_contradict_each_other(tmp_path: Path) -> None:
    target = known(make_host("h", HOSTS["A100"], ("A100",), "2.35"), _matrix())
    answer = resolve(_matrix(), Wish((parse_request("transformers==4.44.2"),), (target,), Options(), None))
    assert answer.plan is not None
    pins = {**answer.plan.pins, "tokenizers": "0.20.0"}
    accepted, words = uv_takes(answer.plan, tmp_path, pins)
    assert not accepted and "tokenizers" in words


def uv_takes(plan: Plan, folder: Path, pins: dict[str, str] | None = None) -> tuple[bool, str]:
    """uv's verdict on the pins that have wheels, and its words."""
    settings = read_pip_settings(os.environ)
    lines = [f"{name}=={version}" for name, version in (pins or dict(plan.pins)).items() if has_wheel(name, version)]
    (folder / "pins.txt").write_text("\n".join(lines) + "\n")
    platform = python_platform(plan.target.arch, plan.target.glibc)
    words = "pip compile pins.txt --no-header --color never --python-version"
    result = run_uv(
        [*words.split(), plan.python, "--python-platform", platform, *index_arguments(settings)],
        env=uv_environment(settings),
        cwd=folder,
        timeout=300,
    )
    return result.code == 0, result.words


def has_wheel(name: str, version: str) -> bool:
    return any(row.version == version and row.wheels for row in load_releases(name))
