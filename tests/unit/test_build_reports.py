"""What public reports of broken images demand of what is rendered, each by its number in the list of reports."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from envforge.cli.source import host_arguments, uv_config
from envforge.image import render
from envforge.image.base import choose_base, devel_base, pinned, stage_for
from envforge.image.context import make_context
from envforge.image.engines import dockercli, podman, venv
from envforge.image.split import parse_lock
from envforge.image.values import BaseInfo, InstallSource
from envforge.lock import LockedPackage, PipSettings
from envforge.matrix.load import load_matrix
from envforge.resolver.constraints import Options
from envforge.resolver.hosts import known, make_host
from envforge.resolver.plan import Plan, Target
from envforge.resolver.request import parse_request
from envforge.resolver.resolve import Wish, resolve
from envforge.spec import Spec

BASES = load_matrix().bases


class Lock:
    """A lock as far as rendering needs it."""

    def __init__(self, *names: str) -> None:
        self.requirements = "".join(f"{name} \\\n    --hash=sha256:{'0' * 64}\n" for name in names)
        self.packages: tuple[LockedPackage, ...] = ()
        self.pylock, self.hash = "lock-version = '1.0'\n", "0" * 64


def planned(requests: list[str], driver: str, gpu: str, **options: object) -> Plan:
    """The resolver's own answer."""
    host = known(make_host("h", driver, (gpu,)), load_matrix())
    wish = Wish(tuple(map(parse_request, requests)), (host,), Options(**options))  # type: ignore[arg-type]
    answer = resolve(load_matrix(), wish)
    assert answer.plan is not None, answer.conflict and answer.conflict.text
    return answer.plan


def dockerfile(plan: Plan, lock: Lock) -> str:
    """The Dockerfile on the base that is chosen for the plan."""
    base = choose_base(plan, lock, BASES)
    info = BaseInfo(pinned(base), base.digest or "", install_python=base.kind != "slim", os=base.os)
    source = InstallSource('index-url = "https://index.example/simple"\n')
    made = make_context(plan, lock, Spec(name="x"), info, source, compile_stage=stage_for(plan, lock, BASES))
    return made.dockerfile


def test_ef42_and_ef66_a_toolkit_of_torchs_cuda_major_where_deepspeed_compiles() -> None:
    target = Target("x86_64", "2.35", "570.86.15", "525.60.13", ("9.0",))
    for minor in ("12.4", "12.6", "12.8", "12.9"):
        plan = Plan("3.12", "cu128", "minor", {"torch": "2.10.0", "deepspeed": "0.18.1"}, (), target, cuda=minor)
        base = choose_base(plan, Lock("torch==2.10.0+cu128"), BASES)
        assert (base.kind, (base.cuda or "").split(".")[0]) == ("cuda-devel", "12"), minor
        text = dockerfile(plan, Lock("torch==2.10.0+cu128"))
        assert 'CUDA_HOME="/usr/local/cuda"' in text
    without = replace(plan, pins={"torch": "2.10.0"})
    assert choose_base(without, Lock("torch==2.10.0+cu128"), BASES).kind == "slim"
    assert "CUDA_HOME" not in dockerfile(without, Lock("torch==2.10.0+cu128"))


def test_ef49_no_tool_ever_chooses_a_torch_build() -> None:
    sources = [path.read_text() for path in render.TEMPLATES.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    for module in (dockercli, podman, venv):
        sources.append((module.__file__ and open(module.__file__).read()) or "")  # noqa: PTH123, SIM115
    for text in sources:
        assert "torch-backend" not in text
        assert "UV_TORCH_BACKEND" not in text
    assert "--default-index" in host_arguments(PipSettings(), None)
    assert uv_config(PipSettings(), None).startswith("index-url = ")
    for line in re.findall(r'"\$uv" .*?\n(?!\s*-)', "".join(sources), re.S):
        assert "venv --no-config" in line or '--config-file "$config"' in line, line


def test_ef52_index_base_toolkit_and_check_come_from_one_value() -> None:
    plan = planned(["torch==2.6.0", "flash-attn"], "550.54.15", "sm_86", variant="cu126")
    assert (plan.variant, plan.cuda) == ("cu126", "12.6")
    assert f"cu{(plan.cuda or '').replace('.', '')}" == plan.variant
    base = devel_base(plan, BASES)
    assert base is not None
    assert (base.cuda or "").startswith("12.")
    if plan.source_only:
        stage = stage_for(plan, Lock(), BASES)
        assert stage is not None
        assert stage.base == pinned(base)
    # The proof compares with the same field of the plan in the image.
    assert json.loads(plan.dumps())["cuda"] == "12.6"


def test_ef57_an_image_asks_for_no_driver_that_the_host_lacks() -> None:
    plan = planned(["torch==2.6.0"], "550.144.03", "sm_80")
    text = dockerfile(plan, Lock(f"torch==2.6.0+{plan.variant}"))
    assert re.search(r"^FROM (python|debian|ubuntu):", text, re.M)
    assert "NVIDIA_REQUIRE_CUDA" not in text
    # On a CUDA base the override says torch's own major and never another.
    toolkit = replace(plan, python="3.10", pins={**plan.pins, "deepspeed": "0.16.4"})
    text = dockerfile(toolkit, Lock(f"torch==2.6.0+{plan.variant}"))
    assert re.findall(r'NVIDIA_REQUIRE_CUDA="([^"]*)"', text) == ["cuda>=12.0"]


@pytest.mark.parametrize(("memory", "jobs"), [(16, (1, 2)), (4, (1,)), (64, (8,))])
def test_ef64_a_compile_stage_fits_the_memory(memory: float, jobs: tuple[int, ...]) -> None:
    target = Target("x86_64", "2.35", "550.54.15", "525.60.13", ("8.0", "9.0"))
    pins = {"torch": "2.6.0", "flash-attn": "2.7.4.post1"}
    plan = Plan("3.10", "cu126", "minor", pins, (), target, cuda="12.6", source_only=("flash-attn",))
    base = devel_base(plan, BASES)
    assert base is not None
    stage = render.compile_stage(plan, pinned(base), memory)
    assert stage.max_jobs in jobs
    assert stage.arch_list == "8.0;9.0"
    text = dockerfile(plan, Lock("torch==2.6.0+cu126", "flash-attn==2.7.4.post1"))
    assert f"FROM {pinned(base)} AS compile" in text
    script = (render.TEMPLATES / "image" / "install.sh").read_text()
    assert "--no-build-isolation" in script
    tools = (render.TEMPLATES / "image" / "tools.txt").read_text()
    assert {row.name for row in parse_lock(tools)} >= {"ninja", "setuptools", "wheel", "packaging"}
    # Whatever is installed, wherever: with its hash.
    installs = [line for line in script.replace("\\\n", " ").splitlines() if " pip install " in line]
    assert len(installs) == 3
    assert all("--require-hashes" in words for words in installs)
    # With a ready-made wheel for it nothing is compiled, and no toolkit is fetched.
    ready = Lock("torch==2.6.0+cu126", "flash-attn==2.7.4.post1")
    wheel = LockedPackage("flash-attn", "2.7.4.post1", "find-links", ("sha256:0",), "flash_attn.whl", path="/w/x.whl")
    ready.packages = (wheel,)
    assert " AS compile" not in dockerfile(plan, ready)
    ready.packages = (replace(wheel, kind="source", file="flash_attn.tar.gz"),)
    assert " AS compile" in dockerfile(plan, ready)


def test_ef61_ef67_ef87_a_plain_stack_on_a_gpu() -> None:
    plan = planned(["torch==2.7.1", "transformers", "peft"], "550.54.15", "sm_80")
    names = ("torch==2.7.1+cu126", "triton==3.3.1", "nvidia-cudnn-cu12==9.5.1.17", "transformers==4.57.1")
    text = dockerfile(plan, Lock(*names))
    assert "nvidia/cuda" not in text
    assert "LD_LIBRARY_PATH" not in text
    assert 'NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility"' in text
    for package in ("ibverbs-providers", "libibverbs1", "librdmacm1"):
        assert f'"{package}"' in text, "NCCL falls back to TCP without a word"
    # What downloads goes through a cache mount, never into a layer.
    installs = [step for step in text.split("\nRUN ") if "parts/" in step]
    assert len(installs) == 2
    assert all("--mount=type=cache,id=envforge-uv" in step for step in installs)


@pytest.mark.parametrize(("name", "tidy"), [("venv", "free some space, or"), ("podman", "(podman image prune)")])
def test_a_disk_that_is_too_small_names_what_the_engine_itself_could_free(name: str, tidy: str) -> None:
    from envforge.errors import DiskFullError
    from envforge.image.space import check_space
    from envforge.image.system import SystemPackages
    from envforge.image.values import BaseInfo, Prediction, silent

    engine: Any = SimpleNamespace(name=name, inspect=lambda ref: None, free_space=lambda: 10)
    with pytest.raises(DiskFullError) as stop:
        check_space(Prediction(5, 20, 10), SimpleNamespace(), BaseInfo("b"), SystemPackages(), engine, silent)  # type: ignore[arg-type]
    assert tidy in stop.value.hint and "docker" not in stop.value.hint
