"""The rendered Dockerfile: goldens for the kinds of plan, and what must never or always be in one."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envforge.errors import DataError, OutsideError, UsageError
from envforge.image import quote, render
from envforge.image.address import content_address, image_tag
from envforge.image.base import choose_base, pinned
from envforge.image.build import render_plan
from envforge.image.context import find_wheels, make_context, verify_settings, write_context
from envforge.image.split import parse_lock, split_lock
from envforge.image.values import BaseInfo, BuildOptions, Dialect, InstallSource
from envforge.lock.formats import LockedPackage, requirements_text
from envforge.matrix.load import load_matrix
from envforge.resolver.plan import Plan, Target, load_plan
from envforge.spec import Spec, VerifySpec

GOLDEN = Path(__file__).parent.parent / "golden" / "render"
BASE = BaseInfo("python:3.11-slim-bookworm@sha256:" + "ab" * 32, "sha256:" + "ab" * 32, os="debian12")
SOURCE = InstallSource(uv_config='index-url = "https://index.example/simple"\n')


@dataclass(frozen=True)
class Lock:
    """A lock as far as rendering needs it."""

    requirements: str
    pylock: str = "lock-version = '1.0'\n"

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.requirements.encode()).hexdigest()


def lock_of(*names: str) -> Lock:
    """`name==version` words -> hashed lines."""
    return Lock(
        "".join(f"{name} \\\n    --hash=sha256:{hashlib.sha256(name.encode()).hexdigest()}\n" for name in names)
    )


CPU = Plan(
    python="3.11",
    variant="cpu",
    tier="cpu",
    pins={"torch": "2.13.0", "transformers": "5.17.0"},
    requests=("transformers",),
    target=Target(arch="x86_64", glibc=None, driver=None, driver_floor=None),
)
CPU_LOCK = lock_of("torch==2.13.0+cpu", "filelock==3.20.0", "transformers==5.17.0", "numpy==2.4.6")
GPU = replace(
    CPU,
    variant="cu126",
    tier="minor",
    cuda="12.6",
    pins={"torch": "2.6.0", "unsloth": "2025.3.1"},
    target=Target("x86_64", "2.31", "535.104.05", "525.60.13", ("8.0", "8.6"), ("a", "b"), 81920),
)
GPU_LOCK = lock_of("torch==2.6.0+cu126", "triton==3.2.0", "nvidia-cudnn-cu12==9.5.1.17", "unsloth==2025.3.1")
COMPILE = replace(GPU, python="3.10", pins={**GPU.pins, "flash-attn": "2.7.4.post1"}, source_only=("flash-attn",))
COMPILE_LOCK = lock_of("torch==2.6.0+cu126", "triton==3.2.0", "flash-attn==2.7.4.post1", "einops==0.8.1")
RICH = Spec(
    name="own-stack",
    system_packages=("libsndfile1", "ffmpeg=7:5.1.6-0+deb12u1"),
    env={"GREETING": 'say "hi" to $USER \\ `id`', "A": "1"},
    files={"/etc/own stack.conf": "own.conf", "/opt/x/$y": "own.conf"},
    folder=Path(__file__).parent.parent / "golden" / "render",
)
CASES: dict[str, tuple[Plan, Lock, Spec, Dialect]] = {
    "cpu": (CPU, CPU_LOCK, Spec(name="llama3-transformers"), "buildkit"),
    "cpu-plain": (CPU, CPU_LOCK, Spec(name="llama3-transformers"), "plain"),
    "gpu": (GPU, GPU_LOCK, Spec(name="unsloth", verify=VerifySpec(stack="unsloth")), "buildkit"),
    "gpu-compile": (COMPILE, COMPILE_LOCK, Spec(name="flash"), "buildkit"),
    "gpu-compile-plain": (COMPILE, COMPILE_LOCK, Spec(name="flash"), "plain"),
    "spec": (CPU, CPU_LOCK, RICH, "buildkit"),
    "spec-plain": (CPU, CPU_LOCK, RICH, "plain"),
}


def rendered(case: str) -> str:
    """The Dockerfile of a case. What hashes other files, and the plan's own text, is held by tests of its own."""
    plan, lock, spec, dialect = CASES[case]
    stage = render.Compile("nvidia/cuda:12.6.3-devel-ubuntu22.04", "8.0;8.6", 2) if plan.source_only else None
    base = replace(BASE, ref=BASE.ref.replace("3.11", plan.python))
    labels = render.labels(plan, lock, spec, base, "0" * 64, 1_700_000_000)
    labels |= {"envforge.plan": '{"the": "plan"}', "envforge.plan-hash": "1" * 64}
    return render.render_dockerfile(plan, lock, spec, base, labels, dialect=dialect, compile_stage=stage)


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    """Refresh with ENVFORGE_WRITE_GOLDENS=1, and read the difference."""
    path = GOLDEN / f"{case}.Dockerfile"
    text = rendered(case)
    if os.environ.get("ENVFORGE_WRITE_GOLDENS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_what_every_dockerfile_keeps_to(case: str) -> None:
    text = rendered(case)
    assert "LD_LIBRARY_PATH" not in text
    assert not re.search(r"\bauto\b", text), "no torch backend is ever chosen by a tool"
    for name in ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR", "CUDA_CACHE_PATH"):
        assert f'{name}="/opt/envforge/cache/' in text
    assert 'PYTHONNOUSERSITE="1"' in text
    assert 'NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility"' in text
    assert "\nUSER 1000:0\n" in text
    lines = text.splitlines()
    first_label = next(i for i, line in enumerate(lines) if line.startswith("LABEL"))
    assert all(line.startswith("LABEL") for line in lines[first_label:]), "labels come last"
    # No shell reads anything: every RUN is in exec form, every COPY and ENTRYPOINT is a list.
    joined = re.sub(r"\\\n\s*", "", text)
    for line in joined.splitlines():
        if line.startswith("RUN "):
            words = json.loads(re.sub(r"^RUN (--mount=\S+ )*", "", line))
            assert words[0] == "/bin/sh"
            assert words[1].startswith("/run/envforge/scripts/")
    assert ("--mount" in text) == (not case.endswith("plain"))
    torch, stack = text.index('parts/torch", "'), text.index('parts/stack", "')
    assert torch < stack < text.index("image/") < first_label_at(text)


def first_label_at(text: str) -> int:
    """Where the labels begin."""
    return text.index("\nLABEL")


def test_a_compiler_only_where_triton_needs_one() -> None:
    assert "gcc" not in rendered("cpu")
    assert '"--headers", "3.11", "gcc"' in rendered("gpu")
    no_triton = replace(GPU, pins={"torch": "2.6.0"})
    assert render.system_packages(no_triton, lock_of("torch==2.6.0+cu126")) == (
        "ibverbs-providers", "libibverbs1", "librdmacm1",
    )  # fmt: skip


def test_torch_keeps_its_local_label_and_stands_in_its_own_part() -> None:
    parts = split_lock(GPU_LOCK.requirements)
    assert [r.name for r in parse_lock(parts.torch)] == ["torch", "triton", "nvidia-cudnn-cu12"]
    assert "torch==2.6.0+cu126" in parts.torch
    assert [r.name for r in parse_lock(parts.stack)] == ["unsloth"]


def test_torchs_closure_follows_the_via_remarks_of_a_lock() -> None:
    text = (
        "accelerate==1.0 \\\n    --hash=sha256:" + "a" * 64 + "\n    # via -r in.txt\n"
        "filelock==3.2 \\\n    --hash=sha256:" + "b" * 64 + "\n    # via\n    #   torch\n    #   transformers\n"
        "mpmath==1.3 \\\n    --hash=sha256:" + "c" * 64 + "\n    # via sympy\n"
        "sympy==1.4 \\\n    --hash=sha256:" + "d" * 64 + "\n    # via torch\n"
        "torch==2.6.0+cu126 \\\n    --hash=sha256:" + "e" * 64 + " \\\n    --hash=sha256:" + "f" * 64 + "\n"
        "    # via accelerate\n"
    )
    parts = split_lock("--index-url https://x/simple\n# comment\n" + text)
    assert [r.name for r in parse_lock(parts.torch)] == ["filelock", "mpmath", "sympy", "torch"]
    assert [r.name for r in parse_lock(parts.stack)] == ["accelerate"]
    assert parse_lock(parts.torch)[-1].hashes == ("e" * 64, "f" * 64)
    assert "#" not in parts.torch + parts.stack


def test_every_line_of_a_lock_is_in_exactly_one_part() -> None:
    parts = split_lock(COMPILE_LOCK.requirements, ("flash_attn",))
    names = [r.name for text in (parts.torch, parts.stack, parts.compile) for r in parse_lock(text)]
    assert sorted(names) == sorted(r.name for r in parse_lock(COMPILE_LOCK.requirements))
    assert [r.name for r in parse_lock(parts.compile)] == ["flash-attn"]


def test_what_the_lock_says_is_source_only_may_be_built() -> None:
    """The remark is the lock's own; compiles of ours are none of it."""
    packages = [
        LockedPackage(name, "1.0", kind, ("sha256:" + "a" * 64,), f"{name}-1.0")
        for name, kind in (("demo", "default"), ("flash-attn", "source"), ("func-timeout", "source"))
    ]
    text = requirements_text(
        packages, python="3.11", platform="linux", variant="cpu", torch_index=None, local=False
    )  # fmt: skip
    parts = split_lock(text, ("flash-attn",))
    assert [line for line in parts.stack.splitlines() if line.startswith("--")] == ["--no-binary func-timeout"]
    assert not any(line.startswith("--") for line in (parts.torch + parts.compile).splitlines())


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=60))
def test_a_quoted_value_comes_back_from_docker_syntax(value: str) -> None:
    assert unquote(quote.quoted(value)) == value


def unquote(word: str) -> str:
    """What the Dockerfile parser makes of a double-quoted word (documented: backslash escapes and $ expansion)."""
    assert word[0] == word[-1] == '"'
    out, rest = "", word[1:-1]
    while rest:
        if rest[0] == "\\" and rest[1:2] and rest[1] in '\\"$':
            out, rest = out + rest[1], rest[2:]
        else:
            assert rest[0] not in '"$', "an unescaped quote or variable"
            out, rest = out + rest[0], rest[1:]
    return out


@pytest.mark.parametrize(
    "bad", ["a\nRUN id", "a\r", "a\0b", "\x1b[31m", "a\x7f", "a\x85RUN id", "a\u2028RUN id", "a\u2029b"]
)
def test_control_characters_are_refused_everywhere(bad: str) -> None:
    for spec in (Spec(name="x", env={"A": bad}), Spec(name="x", files={f"/x{bad}": "f"}), Spec(name=bad)):
        with pytest.raises(DataError) as error:
            render_one(spec)
        assert "line break or control character" in error.value.cause


def render_one(spec: Spec) -> str:
    """The CPU case with another spec."""
    labels = render.labels(CPU, CPU_LOCK, spec, BASE, "0" * 64, None)
    return render.render_dockerfile(CPU, CPU_LOCK, spec, BASE, labels)


@pytest.mark.parametrize(
    "spec",
    [
        Spec(name="x", env={"A B": "1"}),
        Spec(name="x", env={"A=$(id)": "1"}),
        Spec(name="x", env={"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}),
        Spec(name="x", env={"PATH": "/x"}),
        Spec(name="x", system_packages=("--allow-unauthenticated",)),
        Spec(name="x", system_packages=("gcc; id",)),
        Spec(name="x", files={"relative": "f"}),
        Spec(name="x", files={"/opt/../etc/passwd": "f"}),
        Spec(name="x", files={"/proc/x": "f"}),
        Spec(name="x", files={"/opt/envforge/env/bin/python": "f"}),
    ],
    ids=lambda spec: str(spec.env or spec.system_packages or spec.files),
)
def test_what_a_spec_may_not_say(spec: Spec) -> None:
    with pytest.raises(DataError):
        render_one(spec)


@pytest.mark.parametrize("ref", ["a b", "x\nRUN id", "$(id)", "UPPER/x", "-x", "x@sha256:12", ""])
def test_a_base_that_is_no_reference_is_refused(ref: str) -> None:
    with pytest.raises(DataError):
        quote.reference(ref)


@pytest.mark.parametrize(
    "ref", ["debian:12", "python:3.11-slim@sha256:" + "0" * 64, "registry.example:5000/a/b:c", "localhost:5000/x"]
)
def test_references_of_all_shapes_are_taken(ref: str) -> None:
    assert quote.reference(ref) == ref


def test_a_long_plan_is_packed_and_comes_back() -> None:
    long = replace(CPU, requests=tuple(f"package-{i}==1.{i}" for i in range(2000)))
    label = render.pack_plan(long)
    assert len(label) < 20_000
    assert load_plan(render.unpack_plan(label)) == long
    assert load_plan(render.unpack_plan(render.pack_plan(CPU))) == CPU
    with pytest.raises(DataError):
        render.unpack_plan("zlib+base64:damaged")


def test_the_address_changes_with_what_is_inside_and_with_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("one")
    spec = Spec(name="x", files={"/f": "f"}, folder=tmp_path)
    first = content_address(CPU, CPU_LOCK, spec, BASE, "image")
    same = replace(CPU, warnings=(), requests=("transformers>=5",), matrix_hash="other")
    assert content_address(same, CPU_LOCK, spec, BASE, "image") == first
    other_lock = lock_of("torch==2.13.0+cpu")
    others = [
        content_address(CPU, other_lock, spec, BASE, "image"),
        content_address(CPU, CPU_LOCK, replace(spec, env={"A": "1"}), BASE, "image"),
        content_address(CPU, CPU_LOCK, replace(spec, system_packages=("gcc",)), BASE, "image"),
        content_address(CPU, CPU_LOCK, spec, replace(BASE, digest="sha256:" + "cd" * 32), "image"),
        content_address(replace(CPU, target=replace(CPU.target, arch="aarch64")), CPU_LOCK, spec, BASE, "image"),
        content_address(CPU, CPU_LOCK, spec, BASE, "venv"),
    ]
    (tmp_path / "f").write_text("two")
    others.append(content_address(CPU, CPU_LOCK, spec, BASE, "image"))
    assert len({first, *others}) == len(others) + 1


def test_the_tag_says_stack_torch_variant_and_hash() -> None:
    assert image_tag(GPU, GPU_LOCK, Spec(name="unsloth"), "c0ffee" * 10) == "envforge/unsloth:2.6.0-cu126-c0ffeec0ffee"


def test_bases_come_from_the_matrix_and_follow_the_plan() -> None:
    bases = load_matrix().bases
    slim = choose_base(CPU, CPU_LOCK, bases)
    assert (slim.kind, slim.ref) == ("slim", "python:3.11-slim-bookworm")
    assert "@sha256:" in pinned(slim)
    assert choose_base(GPU, GPU_LOCK, bases).kind == "slim", "torch's wheels bring CUDA: no CUDA image"
    deepspeed = replace(GPU, python="3.10", pins={**GPU.pins, "deepspeed": "0.16.4"})
    toolkit = choose_base(deepspeed, GPU_LOCK, bases)
    assert (toolkit.kind, (toolkit.cuda or "")[:4]) == ("cuda-devel", "12.6")
    # Nothing newer than torch's own CUDA is taken while an older one of the major is there.
    old = replace(deepspeed, cuda="12.3")
    assert (choose_base(old, GPU_LOCK, bases).cuda or "")[:4] <= "12.3"
    with pytest.raises(UsageError):
        choose_base(replace(CPU, python="3.7"), CPU_LOCK, bases)


def test_deepspeed_brings_nvcc_of_torchs_cuda_and_its_home() -> None:
    bases = load_matrix().bases
    plan = replace(GPU, python="3.10", pins={**GPU.pins, "deepspeed": "0.16.4"})
    base = choose_base(plan, GPU_LOCK, bases)
    info = BaseInfo(base.ref, install_python=True)
    labels = render.labels(plan, GPU_LOCK, Spec(name="x"), info, "0" * 64, None)
    text = render.render_dockerfile(plan, GPU_LOCK, Spec(name="x"), info, labels)
    assert 'CUDA_HOME="/usr/local/cuda" NVIDIA_REQUIRE_CUDA="cuda>=12.0"' in text
    assert '"--python", "3.10"' in text
    assert "CUDA_HOME" not in rendered("gpu")


def test_compile_jobs_follow_memory_and_architectures_the_fleet() -> None:
    stage = render.compile_stage(COMPILE, "nvidia/cuda:12.6.3-devel-ubuntu22.04", 16)
    assert (stage.max_jobs, stage.arch_list) == (2, "8.0;8.6")
    assert render.compile_stage(COMPILE, "x", 4).max_jobs == 1
    assert "ninja-build" in stage.packages
    text = rendered("gpu-compile")
    assert 'TORCH_CUDA_ARCH_LIST="8.0;8.6" MAX_JOBS=2' in text
    script = (render.TEMPLATES / "image" / "install.sh").read_text()
    assert "--no-build-isolation" in script


def test_plain_with_a_password_is_refused() -> None:
    source = InstallSource('index-url = "https://u:p@x/simple"\n', secret=True)
    with pytest.raises(UsageError) as error:
        make_context(CPU, CPU_LOCK, Spec(name="x"), BASE, source, dialect="plain")
    assert "u:p" not in error.value.render()


def test_only_wheels_with_the_locks_hash_are_carried(tmp_path: Path) -> None:
    good, bad = tmp_path / "numpy-2.4.6-py3-none-any.whl", tmp_path / "transformers-5.17.0-py3-none-any.whl"
    good.write_bytes(b"the wheel")
    bad.write_bytes(b"something else")
    text = (
        f"numpy==2.4.6 --hash=sha256:{hashlib.sha256(b'the wheel').hexdigest()}\n"
        f"transformers==5.17.0 --hash=sha256:{'0' * 64}\n"
    )
    assert find_wheels(parse_lock(text), [tmp_path]) == {"numpy": (good,)}


def test_the_context_holds_no_settings_and_render_puts_them_beside_it(tmp_path: Path) -> None:
    options = BuildOptions(source=SOURCE, base="debian:12")
    out = tmp_path / "out"
    context = render_plan(CPU, CPU_LOCK, Spec(name="x"), options, out)
    assert "index.example" not in context.dockerfile
    assert (out / "uv.toml").read_text() == SOURCE.uv_config
    assert "/uv.toml\n" in (out / ".dockerignore").read_text()
    holding = [p for p in out.rglob("*") if p.is_file() and b"index.example" in p.read_bytes()]
    assert holding == [out / "uv.toml"]
    assert os.access(out / "image/bin/envforge-entrypoint", os.X_OK)
    # Again into the same folder: replaced as a whole.
    (out / "build" / "stale").write_text("x")
    render_plan(CPU, CPU_LOCK, Spec(name="x"), options, out)
    assert not (out / "build" / "stale").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("beside", [{}, {"Dockerfile": "FROM mine"}, {"Dockerfile": "x", "image/plan.json": "{}"}])
def test_render_never_replaces_somebody_elses_folder(tmp_path: Path, beside: dict[str, str]) -> None:
    for name, text in {"thesis.txt": "years of work", **beside}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        render_plan(CPU, CPU_LOCK, Spec(name="x"), BuildOptions(source=SOURCE, base="debian:12"), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_render_says_so_where_no_folder_can_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    options = BuildOptions(source=SOURCE, base="debian:12")
    for place in ("file", "file/inside", ".", "..", "loop", "/proc/self/x"):
        with pytest.raises((UsageError, OutsideError)):
            render_plan(CPU, CPU_LOCK, Spec(name="x"), options, Path(place))
    assert (tmp_path / "file").read_text() == "mine"


def test_render_follows_a_link_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    render_plan(CPU, CPU_LOCK, Spec(name="x"), BuildOptions(source=SOURCE, base="debian:12"), tmp_path / "link")
    assert (tmp_path / "real" / "Dockerfile").is_file()
    assert (tmp_path / "link").is_symlink()


def test_credentials_are_not_written_when_rendering(tmp_path: Path) -> None:
    source = InstallSource('index-url = "https://u:s3cr3t@x/simple"\n', secret=True)
    render_plan(CPU, CPU_LOCK, Spec(name="x"), BuildOptions(source=source, base="debian:12"), tmp_path / "out")
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file() and b"s3cr3t" in p.read_bytes()]


def test_a_file_of_the_spec_that_is_missing_or_leads_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spec").mkdir()
    (tmp_path / "outside").write_text("x")
    (tmp_path / "spec" / "link").symlink_to(tmp_path / "outside")
    for source in ("missing", "link"):
        spec = Spec(name="x", files={"/a": source}, folder=tmp_path / "spec")
        with pytest.raises(DataError):
            make_context(CPU, CPU_LOCK, spec, BASE, SOURCE)


def test_the_whole_context_can_be_laid_out_twice_the_same(tmp_path: Path) -> None:
    context = make_context(CPU, CPU_LOCK, Spec(name="x"), BASE, SOURCE)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_context(context, tmp_path / name)
    a, b = (
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*") if p.is_file()} for n in "ab"
    )
    assert a == b


def test_an_option_that_the_proof_does_not_know_is_told_before_the_build() -> None:
    assert verify_settings(Spec(name="x", verify=VerifySpec(options={"accumulation": 2})))["accumulation"] == 2
    with pytest.raises(DataError, match=r"acumulation.*did you mean accumulation"):
        verify_settings(Spec(name="x", verify=VerifySpec(options={"acumulation": 2})))
