"""What a build does around the engine: order, reuse, receipts, names. The engine is a stand-in that keeps a diary."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_render import BASE, CPU, CPU_LOCK, GPU, SOURCE, Lock

from envforge.errors import DiskFullError, ModelError, OutsideError, ProofFailedError, UsageError
from envforge.image.build import build_plan
from envforge.image.engines import EngineStatus, ImageInfo, Mount, RunResult
from envforge.image.prove import PENDING
from envforge.image.split import parse_lock
from envforge.image.values import BaseInfo, BuildContext, BuildOptions, Event, Prediction, Progress, silent
from envforge.resolver.plan import Plan
from envforge.spec import ModelSpec, Spec

SPEC = Spec(name="demo")


class Diary:
    """An engine that builds nothing and remembers what it was told, in order."""

    name = "docker"

    def __init__(self, code: int = 0, gpus: bool = False, free: int | None = None) -> None:
        self.code, self.with_gpus, self.free = code, gpus, free
        self.did: list[str] = []
        self.release = 1
        self.images: list[ImageInfo] = []
        self.argv: list[str] = []
        self.kept: dict[str, object] = {}

    def available(self) -> EngineStatus:
        return EngineStatus(True)

    def base(self, ref: str, python: str, progress: Progress = silent) -> BaseInfo:
        self.did.append("base")
        return replace(BASE, python="/usr/bin/python3.11")

    def ask(self, image: ImageInfo, argv: list[str]) -> RunResult:
        inside = {"debs": [["libc6", "2.36-9", "amd64"]], "licences": {"Torch": "BSD-3-Clause"}}
        return RunResult(0, json.dumps(inside))

    def pull(self, reference: str, progress: Progress = silent) -> ImageInfo:
        self.did.append("pull")
        return ImageInfo("sha256:base", (reference,), {}, 1)

    def find(self, label: str, value: str) -> tuple[ImageInfo, ...]:
        return tuple(image for image in self.images if image.labels.get(label) == value and image.names)

    def inspect(self, reference: str) -> ImageInfo | None:
        return None

    def build(self, context: BuildContext, log: Path, progress: Progress = silent) -> ImageInfo:
        self.did.append("build")
        self.dockerfile, self.labels = context.dockerfile, context.labels
        self.files = {name: f.content for name, f in context.files.items() if isinstance(f.content, bytes)}
        return ImageInfo(f"sha256:{len(self.did)}", (), context.labels, 123)

    def tag(self, image: ImageInfo, reference: str) -> ImageInfo:
        self.did.append(f"tag {reference.split(':')[0]}")
        self.images.append(replace(image, names=(reference,)))
        return self.images[-1]

    def run(
        self,
        reference: str,
        argv: list[str],
        *,
        mounts: tuple[Mount, ...] = (),
        network: str = "none",
        user: str | None = None,
        env: dict[str, str] | None = None,
        fetch: str | None = None,
        gpus: bool = False,
        progress: Progress = silent,
    ) -> RunResult:
        if "--versions" in argv:
            self.did.append("versions")
            return RunResult(0, "".join(f"{name}=1.0-{self.release}\n" for name in argv if name.startswith("lib")))
        self.did.append("verify")
        self.argv = argv
        self.kept = {"mounts": mounts, "network": network, "env": env, "gpus": gpus}
        grade = argv[argv.index("--grade") + 1]
        receipt = {"passed": self.code == 0, "grade": grade}
        return RunResult(self.code, "FAILED in the chat layer: no", json.dumps(receipt).encode())

    def free_space(self) -> int | None:
        return self.free

    def gpus(self) -> bool:
        return self.with_gpus


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path / "model"


def options(tmp_path: Path, **changes: object) -> BuildOptions:
    return BuildOptions(**{"source": SOURCE, "state": tmp_path / "state", "base": "debian:12", **changes})  # type: ignore[arg-type]


def test_the_name_comes_after_the_proof(tmp_path: Path, model: Path) -> None:
    engine = Diary()
    result = build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model)), engine=engine)
    assert engine.did == ["base", "build", "verify", "tag envforge/demo"]
    assert (result.grade, result.pending, result.reused) == ("full", None, False)
    assert engine.kept["network"] == "none"
    assert engine.kept["mounts"] == (Mount(model, "/opt/envforge/model"),)
    assert engine.argv[engine.argv.index("--model") + 1] == "/opt/envforge/model"
    assert result.receipt is not None
    receipt = json.loads(result.receipt.read_text())
    assert receipt["image"]["digest"] == result.digest


def test_a_failed_proof_gives_no_name_and_says_what_failed(tmp_path: Path, model: Path) -> None:
    engine = Diary(code=1)
    with pytest.raises(ProofFailedError) as error:
        build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model)), engine=engine)
    assert error.value.exit_code == 1
    assert "chat layer" in error.value.cause
    assert not [word for word in engine.did if word.startswith("tag")]
    assert [p.name for p in (tmp_path / "state").rglob("receipt*")] == ["receipt-full-failed.json"]
    engine.code = 0
    assert not build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model)), engine=engine).reused


def test_a_proof_that_could_not_be_run_is_no_verdict(tmp_path: Path, model: Path) -> None:
    with pytest.raises(OutsideError):
        build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model)), engine=Diary(code=3))


def test_what_was_built_and_proven_is_neither_built_nor_proven_again(tmp_path: Path, model: Path) -> None:
    engine = Diary()
    first = build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model)), engine=engine)
    engine.did.clear()
    second = build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model)), engine=engine)
    assert "build" not in engine.did
    assert "verify" not in engine.did
    assert second.reused
    assert (second.receipt, second.digest) == (first.receipt, first.digest)
    again = build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model), rebuild=True), engine=engine)
    assert not again.reused
    assert engine.did[-3:] == ["build", "verify", "tag envforge/demo"]


def test_another_question_to_the_proof_is_asked_again(tmp_path: Path, model: Path) -> None:
    engine = Diary()
    build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model)), engine=engine)
    engine.did.clear()
    build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model), steps=20), engine=engine)
    assert "verify" in engine.did
    assert engine.argv[engine.argv.index("--steps") + 1] == "20"


def test_an_image_built_without_a_proof_is_proven_when_one_is_asked_for(tmp_path: Path, model: Path) -> None:
    engine = Diary()
    assert build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, verify=False), engine=engine).grade is None
    engine.did.clear()
    result = build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model)), engine=engine)
    assert (result.reused, result.grade) == (True, "full")
    assert "build" not in engine.did


def test_a_gpu_plan_without_a_gpu_is_proven_statically_and_says_what_is_pending(tmp_path: Path) -> None:
    engine = Diary()
    result = build_plan(GPU, CPU_LOCK, SPEC, options(tmp_path), engine=engine)
    assert (result.grade, result.pending) == ("static", PENDING)
    assert "--model" not in engine.argv


def test_a_gpu_plan_with_a_gpu_is_proven_on_it(tmp_path: Path, model: Path) -> None:
    engine = Diary(gpus=True)
    result = build_plan(GPU, CPU_LOCK, SPEC, options(tmp_path, model=str(model)), engine=engine)
    assert (result.grade, result.pending) == ("full", None)
    assert engine.kept["gpus"] is True


def test_without_a_model_the_small_one_is_made_between_build_and_proof(tmp_path: Path, model: Path) -> None:
    engine = Diary()

    def make(own: object, image: ImageInfo, reference: str) -> Path:
        engine.did.append("model")
        return model

    build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path), engine=engine, make_model=make)
    assert engine.did[:4] == ["base", "build", "model", "verify"]


def test_a_hub_id_gets_the_network(tmp_path: Path) -> None:
    engine = Diary()
    spec = replace(SPEC, model=ModelSpec("hf:owner/name", small=False))
    build_plan(CPU, CPU_LOCK, spec, options(tmp_path), engine=engine)
    assert engine.argv[engine.argv.index("--model") + 1] == "owner/name"
    assert engine.kept["network"] == "host"
    assert not {"HF_HUB_OFFLINE", "HF_ENDPOINT"} & set(engine.kept["env"])  # type: ignore[call-overload]
    mirrored = options(tmp_path, source=replace(SOURCE, hub="https://hub.example"), rebuild=True)
    build_plan(CPU, CPU_LOCK, spec, mirrored, engine=engine)
    assert engine.kept["env"]["HF_ENDPOINT"] == "https://hub.example"  # type: ignore[index]


def test_a_folder_that_is_no_model_is_told_before_anything_is_built(tmp_path: Path) -> None:
    engine = Diary()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError):
        build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, model=str(tmp_path / "empty")), engine=engine)
    assert engine.did == []


def test_what_cannot_fit_is_refused_before_it_is_built(tmp_path: Path) -> None:
    class Big(Lock):
        size = 4_000_000_000

    engine = Diary(free=15_000_000_000)
    with pytest.raises(DiskFullError) as error:
        build_plan(CPU, Big(CPU_LOCK.requirements), SPEC, options(tmp_path), engine=engine)
    assert "16.0 GB" in error.value.cause
    assert "build" not in engine.did
    engine.free = 17_000_000_000
    build_plan(CPU, Big(CPU_LOCK.requirements), SPEC, options(tmp_path, verify=False), engine=engine)


def test_what_the_wheels_themselves_say_counts_and_so_does_a_warm_cache(tmp_path: Path) -> None:
    told = Prediction(download=1_000_000, unpacked=6_000_000_000, image=5_000_000_000, carried=500_000_000, exact=True)
    engine = Diary(free=12_500_000_000)
    events: list[Event] = []
    with pytest.raises(DiskFullError) as error:
        build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path), engine=engine, measure=lambda: told, progress=events.append)
    assert "13.0 GB" in error.value.cause
    assert any(event.text.startswith("1 MB to download, 5,000 MB when it is done, at most 13,000") for event in events)
    engine.build_cache = lambda: 6_000_000_000  # type: ignore[attr-defined]
    build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, verify=False), engine=engine, measure=lambda: told)
    # What is there already is not measured.
    build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, verify=False), engine=engine, measure=lambda: 1 / 0)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("tag", ["UPPER", "a b", "$(id)"])
def test_a_second_name_is_checked_first(tmp_path: Path, tag: str) -> None:
    engine = Diary()
    with pytest.raises(UsageError):
        build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, tag=tag), engine=engine)
    assert engine.did == []


def test_a_second_name_is_given(tmp_path: Path) -> None:
    engine = Diary()
    build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, tag="registry.example/own:1", verify=False), engine=engine)
    assert engine.did[-2:] == ["tag envforge/demo", "tag registry.example/own"]


def test_versions_of_system_packages_are_asked_once_and_are_part_of_the_address(tmp_path: Path) -> None:
    engine = Diary()
    made = options(tmp_path, verify=False)
    spec = replace(SPEC, system_packages=("libsndfile1",))
    first = build_plan(GPU, CPU_LOCK, spec, made, engine=engine)
    assert "libsndfile1=1.0-1" in engine.dockerfile
    assert "libibverbs1=1.0-1" in engine.dockerfile
    engine.release = 2
    assert build_plan(GPU, CPU_LOCK, spec, made, engine=engine).address == first.address
    assert engine.did.count("versions") == 1
    # The base is asked anew too.
    fresh = build_plan(GPU, CPU_LOCK, spec, replace(made, refresh_base=True), engine=engine)
    assert (fresh.reused, fresh.address == first.address) == (False, False)
    assert "libsndfile1=1.0-2" in engine.dockerfile
    assert engine.did.count("pull") == 1


def test_what_is_inside_is_listed_beside_the_log_and_in_the_image(tmp_path: Path) -> None:
    engine = Diary()
    result = build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, verify=False), engine=engine)
    assert result.sbom is not None
    outer, inner = json.loads(result.sbom.read_text()), json.loads(engine.files["image/sbom.cdx.json"])
    assert outer["specVersion"] == inner["specVersion"] == "1.5"
    rows = {row["name"]: row for row in outer["components"]}
    torch = rows["torch"]
    assert torch["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert torch["hashes"] == [{"alg": "SHA-256", "content": parse_lock(CPU_LOCK.requirements)[0].hashes[0]}]
    assert torch["licenses"] == [{"license": {"name": "BSD-3-Clause"}}]
    assert rows["libc6"]["purl"] == "pkg:deb/debian/libc6@2.36-9"
    assert rows[BASE.ref]["version"] == BASE.digest
    assert {row["name"] for row in inner["components"]} == set(rows) - {"libc6"}
    label = engine.labels["envforge.sbom"]
    assert f'LABEL "envforge.sbom"="{label}"' in engine.dockerfile
    place, _, digest = label.partition("@sha256:")
    assert place == "/opt/envforge/sbom.cdx.json"
    assert digest == hashlib.sha256(engine.files["image/sbom.cdx.json"]).hexdigest()
    # Again from nothing: the same bytes.
    engine.images.clear()
    (tmp_path / "again").mkdir()
    build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path / "again", verify=False), engine=engine)
    assert digest == hashlib.sha256(engine.files["image/sbom.cdx.json"]).hexdigest()


def test_a_plan_without_system_packages_asks_no_archive(tmp_path: Path) -> None:
    engine = Diary()
    build_plan(CPU, CPU_LOCK, SPEC, options(tmp_path, verify=False), engine=engine)
    assert "versions" not in engine.did


def test_what_must_be_compiled_needs_a_base_with_the_toolkit(tmp_path: Path) -> None:
    plan: Plan = replace(GPU, source_only=("flash-attn",))
    with pytest.raises(UsageError) as error:
        build_plan(plan, CPU_LOCK, SPEC, options(tmp_path), engine=Diary())
    assert "flash-attn" in error.value.cause
