"""The shipped rows: complete in themselves, and true where a fact is easy to state in one line."""

from __future__ import annotations

import dataclasses
import re

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envforge.matrix.load import DATA, load_matrix
from envforge.matrix.model import Source, TorchBuild
from envforge.matrix.releases import load_releases

MATRIX = load_matrix(use_cache=False)
# fmt: off
WANTED = (
    "torch", "torchvision", "torchaudio", "triton", "numpy", "transformers", "tokenizers", "huggingface-hub",
    "datasets", "accelerate", "peft", "trl", "bitsandbytes", "deepspeed", "xformers", "flash-attn",
    "liger-kernel", "torchao", "unsloth", "unsloth-zoo", "xtuner", "mmengine", "vllm", "lmdeploy", "sentencepiece",
    "safetensors", "axolotl", "llamafactory", "ms-swift",
)
# fmt: on


def rows() -> list[object]:
    tables = [getattr(MATRIX, field.name) for field in dataclasses.fields(MATRIX)]
    found: list[object] = []
    for table in tables:
        found += table.values() if isinstance(table, dict) else table if isinstance(table, tuple) else []
    return [row for row in found if hasattr(row, "source")]


def build(torch: str, variant: str, arch: str = "x86_64") -> TorchBuild | None:
    return next((b for b in MATRIX.torch_builds if (b.torch, b.variant, b.arch) == (torch, variant, arch)), None)


def test_every_row_has_a_source() -> None:
    assert len(rows()) > 500
    for row in rows():
        source = row.source  # type: ignore[attr-defined]
        assert isinstance(source, Source)
        assert len(source.text) > 3


def test_sources_name_no_place_of_one_machine() -> None:
    for path in DATA.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"stored copy|/work/|/root/|/opt/", text), path.name


def test_every_package_is_there_and_the_ranks_are_one_order() -> None:
    assert set(WANTED) <= set(MATRIX.packages)
    ranks = [package.rank for package in MATRIX.packages.values()]
    assert ranks == sorted(set(ranks))


def test_roles_follow_the_order_of_decisions() -> None:
    order = {"trainer": 0, "framework": 1, "engine": 2, "torch": 3, "companion": 4, "library": 5}
    roles = [order[package.role] for package in MATRIX.packages.values()]
    assert roles == sorted(roles)


@pytest.mark.parametrize(
    ("torch", "variant", "volta"),
    [
        ("2.6", "cu126", True),
        ("2.7", "cu126", True),
        ("2.7", "cu128", False),
        ("2.8", "cu128", True),
        ("2.8", "cu129", True),
        ("2.10", "cu128", True),
        ("2.11", "cu128", False),
        ("2.11", "cu126", True),
        ("2.14", "cu126", True),
        ("2.9", "cu130", False),
        ("2.15", "cu130", False),
        ("2.15", "cu126", None),
    ],
)
def test_volta_comes_and_goes(torch: str, variant: str, volta: bool | None) -> None:
    row = build(torch, variant)
    assert (row and "7.0" in row.sm) == volta


def test_defaults_of_the_index() -> None:
    default = {b.torch: b.variant for b in MATRIX.torch_builds if b.default and b.arch == "x86_64"}
    assert (default["2.1"], default["2.6"], default["2.7"], default["2.10"]) == ("cu121", "cu124", "cu126", "cu128")
    assert {default[minor] for minor in ("2.11", "2.12", "2.13", "2.14")} == {"cu130"}
    assert default["2.15"] == "cu132"
    arm = {b.torch: b.variant for b in MATRIX.torch_builds if b.default and b.arch == "aarch64"}
    assert (arm["2.6"], arm["2.10"], arm["2.11"]) == ("cpu", "cpu", "cu130")


def test_every_minor_has_cpu_builds_for_both_architectures_and_a_default() -> None:
    minors = {b.torch for b in MATRIX.torch_builds}
    assert minors == {"1.13", *(f"2.{n}" for n in range(16))}
    for minor in minors:
        assert build(minor, "cpu")
        assert build(minor, "cpu", "aarch64")
        for arch in ("x86_64", "aarch64"):
            assert sum(b.default for b in MATRIX.torch_builds if (b.torch, b.arch) == (minor, arch)) == 1


def test_minors_of_the_builds_are_those_of_the_releases() -> None:
    released = {".".join(r.version.split(".")[:2]) for r in load_releases("torch")}
    if not released:
        pytest.skip("the release file of torch is not there")
    assert {b.torch for b in MATRIX.torch_builds} <= released | {"1.13", "2.0"}
    assert max(released, key=Version) in {b.torch for b in MATRIX.torch_builds}


def test_every_cuda_of_a_build_has_a_driver_and_a_family() -> None:
    toolkits = {toolkit.cuda for toolkit in MATRIX.toolkits if toolkit.driver}
    families = {family.major for family in MATRIX.families}
    for row in MATRIX.torch_builds:
        if row.cuda:
            assert row.cuda in toolkits
            assert int(row.cuda.split(".")[0]) in families


def test_floors_of_the_cuda_families() -> None:
    assert {f.major: f.min_driver for f in MATRIX.families} == {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def test_every_gpu_belongs_to_a_known_architecture() -> None:
    known = {sm for architecture in MATRIX.architectures for sm in architecture.sm}
    for gpu in MATRIX.gpus:
        assert gpu.sm in known
        assert gpu.bf16 == (Version(gpu.sm) >= Version("8.0"))
        assert gpu.fp8 == (Version(gpu.sm) >= Version("8.9"))
        old, older = Version(gpu.sm) < Version("7.5"), Version(gpu.sm) < Version("5.0")
        assert gpu.last_branch == (470 if older else 580 if old else None)
        assert not gpu.forward or gpu.data_center


def native(package: str, version: str) -> list[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    return [
        (row.cuda, row.match, row.sm)
        for row in MATRIX.native
        if row.package == package and version in SpecifierSet(row.versions)
    ]


def test_bitsandbytes_libraries() -> None:
    assert [match for _, match, _ in native("bitsandbytes", "0.49.2")] == ["exact"] * 3
    assert {match for _, match, _ in native("bitsandbytes", "0.50.2")} == {"major"}
    cuda = {one for row in native("bitsandbytes", "0.47.0") for one in row[0]}
    assert "12.9" in cuda
    assert "13.0" not in cuda
    assert "11.8" in {one for row in native("bitsandbytes", "0.41.2.post2") for one in row[0]}
    [(_, _, hole)] = [row for row in native("bitsandbytes", "0.46.0") if "12.8" in row[0]]
    assert "7.0" not in hole


def test_vllm_is_tied_to_a_cuda_major() -> None:
    majors = {v: {c.split(".")[0] for row in native("vllm", v) for c in row[0]} for v in ("0.2.1", "0.10.0", "0.33.0")}
    assert majors == {"0.2.1": {"11"}, "0.10.0": {"12"}, "0.33.0": {"13"}}


def test_every_bitsandbytes_release_has_libraries() -> None:
    for release in load_releases("bitsandbytes"):
        if Version(release.version) >= Version("0.35"):
            assert native("bitsandbytes", release.version), release.version


def test_source_only_packages() -> None:
    assert {row.package for row in MATRIX.native if row.source_only} == {"deepspeed", "flash-attn"}
    assert {package.name for package in MATRIX.packages.values() if package.sources_ok} == {"deepspeed", "flash-attn"}


RULES = {rule.id: rule for rule in MATRIX.rules}


@pytest.mark.parametrize(
    ("id", "level", "when", "needs"),
    [
        ("numpy2-torch-before-2.3", "hard", {"torch": "<2.3"}, {"numpy": "<2"}),
        ("torch-load-guard", "warn", {"transformers": ">=4.52"}, {"torch": ">=2.6"}),
        ("pyarrow-26-numpy-1", "hard", {"numpy": "<2"}, {"pyarrow": "<26"}),
        ("flash-attn-sm80", "hard", {"flash-attn": ">=2"}, {"sm": ">=8.0"}),
        ("triton-driver", "warn", {"triton": ">=2.0"}, {"driver": ">=525.60.13"}),
        ("unsloth-triton-driver", "hard", {"unsloth": ">=2023"}, {"driver": ">=525.60.13"}),
        ("transformers-torch-5.20", "hard", {"transformers": ">=5.20"}, {"torch": ">=2.6"}),
        ("transformers-peft-5.24", "warn", {"transformers": ">=5.24"}, {"peft": ">=0.22.0"}),
        ("deepspeed-import-socket", "hard", {"deepspeed": ">=0.14.1,<0.14.4"}, {"torch": "<2.4"}),
    ],
)
def test_rules_that_cases_and_stories_lean_on(id: str, level: str, when: object, needs: object) -> None:
    rule = RULES[id]
    assert (rule.level, rule.when, rule.needs) == (level, when, needs)
    assert rule.warning is None or level == "warn"


def test_hidden_needs() -> None:
    assert RULES["mmengine-pkg-resources"].requires == {"setuptools": "<82"}
    assert RULES["bitsandbytes-hidden-scipy"].requires == {"scipy": ">=1.0"}


def test_internlm2_remote_code() -> None:
    [model] = MATRIX.remote_models
    assert model.needs == {"transformers": "<4.50"}
    assert any(word in "internlm/internlm2-chat-7b" for word in model.match)


def test_bases() -> None:
    refs = {base.ref: base for base in MATRIX.bases}
    assert refs["python:3.12-slim-bookworm"].digest
    assert refs["nvidia/cuda:12.6.3-devel-ubuntu24.04"].kind == "cuda-devel"
    assert refs["nvidia/cuda:12.6.3-devel-ubuntu24.04"].glibc == "2.39"
    devel = {base.cuda for base in MATRIX.bases if base.kind == "cuda-devel"}
    assert {row.cuda for row in MATRIX.torch_builds if row.cuda} <= devel


def test_as_of_is_not_before_the_newest_release() -> None:
    newest = max((r.uploaded for name in WANTED for r in load_releases(name)), default="")
    assert newest <= MATRIX.policy.as_of
