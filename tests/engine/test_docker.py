"""The docker engine on a real, private engine: what is in an image, who may write, what is reused."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from engine_index import make_wheel
from standins import DEMO, FILELOCK, TORCH, WHEELS, lock_of, make_plan, make_spec, offline, options

from envforge.errors import EngineError, OutsideError, UsageError
from envforge.image.build import build_plan
from envforge.image.engines.docker import DockerEngine
from envforge.image.render import unpack_plan
from envforge.image.values import BuildResult, Event
from envforge.resolver.plan import Target, load_plan

pytestmark = [pytest.mark.engine]

# Everything that a shell, a Dockerfile parser or JSON could stumble over; none of it may change on the way.
HOSTILE = "a $(touch /tmp/owned) `id` \"q\" 'x' \\ \\\\ ${PATH} $HOME # ; & | > <!> %s {{ x }} {% y %} é \\"


def build(engine: DockerEngine, base: str, tmp: Path, **changes: object) -> BuildResult:
    """One image of stand-ins."""
    spec = changes.pop("spec", make_spec())
    plan = changes.pop("plan", make_plan())
    source = offline(tmp / "wheels", *WHEELS)
    return build_plan(plan, lock_of(*WHEELS), spec, options(source, base=base, **changes), engine=engine)  # type: ignore[arg-type]


def inside(engine: DockerEngine, image: str, *argv: str, user: str | None = None) -> str:
    """Output of a command in a container without network; it must succeed."""
    answer = engine.run(image, list(argv), user=user)
    assert answer.code == 0, answer.output
    return answer.output


def test_an_image_holds_the_lock_and_runs_as_anybody_without_network(
    engine: DockerEngine, base_image: str, tmp_path: Path
) -> None:
    result = build(engine, base_image, tmp_path)
    assert result.reference.startswith("envforge/demo:2.13.0-cpu-")
    script = "import torch, demo_stack, filelock, envforge.verify, os; print(os.getuid(), torch.__version__)"
    assert inside(engine, result.reference, "python", "-c", script) == "1000 2.13.0+cpu"
    assert inside(engine, result.reference, "python", "-c", script, user="12345:0") == "12345 2.13.0+cpu"
    for folder in ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR", "XDG_CACHE_HOME"):
        inside(engine, result.reference, "sh", "-c", f'touch "${folder}/x"', user="12345:0")
    assert inside(engine, result.reference, "sh", "-c", "echo ${LD_LIBRARY_PATH-unset} $NVIDIA_VISIBLE_DEVICES") == (
        "unset all"
    )


def test_labels_carry_plan_hashes_and_driver_floor(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    target = Target(arch="x86_64", glibc="2.31", driver="550.54.15", driver_floor="525.60.13", sm=("8.0", "9.0"))
    plan = make_plan(variant="cu126", tier="minor", cuda="12.6", target=target, requests=("x" * 60,) * 200)
    context_labels = build_labels(engine, base_image, tmp_path, plan)
    assert load_plan(unpack_plan(context_labels["envforge.plan"])) == plan
    assert context_labels["envforge.plan-hash"] == plan.hash()
    assert context_labels["envforge.driver-floor"] == "525.60.13"
    assert context_labels["envforge.sm"] == "8.0,9.0"
    assert context_labels["org.opencontainers.image.created"] == "2020-09-13T12:26:40Z"


def build_labels(engine: DockerEngine, base: str, tmp: Path, plan: object) -> dict[str, str]:
    """Labels of an image for a GPU plan whose system packages are not installed (apt is not under test here)."""
    from envforge.image import render

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "system_packages", lambda plan, lock: ())
        result = build(engine, base, tmp, plan=plan, epoch=1_600_000_000)
    found = engine.inspect(result.reference)
    assert found is not None
    return found.labels


def test_hostile_values_arrive_unchanged_and_nothing_runs(
    engine: DockerEngine, base_image: str, tmp_path: Path
) -> None:
    folder = tmp_path / "spec"
    folder.mkdir()
    (folder / "$(x) [a] *.txt").write_text("content")
    target = "/opt/data/$HOME \"q\" 'x' \\ [a]*.txt"
    spec = make_spec(env={"HOSTILE": HOSTILE, "EMPTY": ""}, files={target: "$(x) [a] *.txt"}, folder=folder)
    result = build(engine, base_image, tmp_path, spec=spec)
    script = "import json, os; print(json.dumps([os.environ['HOSTILE'], os.environ['EMPTY'], os.listdir('/opt/data')]))"
    answer = json.loads(inside(engine, result.reference, "python", "-c", script))
    assert answer == [HOSTILE, "", ["$HOME \"q\" 'x' \\ [a]*.txt"]]
    assert inside(engine, result.reference, "ls", "/tmp") == ""


def test_nothing_is_built_twice(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    spec = make_spec(env={"TWICE": "1"})
    first = build(engine, base_image, tmp_path, spec=spec)
    events: list[Event] = []
    second = build_plan(
        make_plan(), lock_of(*WHEELS), spec, options(offline(tmp_path / "w", *WHEELS), base=base_image),
        engine=engine, progress=events.append,
    )  # fmt: skip
    assert (first.reused, second.reused) == (False, True)
    assert second.digest == first.digest
    assert not any("installing" in event.text for event in events)
    other = build(engine, base_image, tmp_path, spec=make_spec(env={"TWICE": "2"}))
    assert not other.reused
    assert other.digest != first.digest


def test_two_stacks_on_one_torch_share_its_layer(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    first = build(engine, base_image, tmp_path, spec=make_spec(name="one"))
    other = make_wheel("other-stack", "2.0")
    lock = lock_of(TORCH, FILELOCK, other)
    source = offline(tmp_path / "more", TORCH, FILELOCK, other)
    second = build_plan(make_plan(), lock, make_spec(name="two"), options(source, base=base_image), engine=engine)
    one, two = (
        engine.client.images.get(name).attrs["RootFS"]["Layers"] for name in (first.reference, second.reference)
    )
    shared = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
    # base, folders, environment, torch; the stack is the first that differs
    assert len(shared) == 4
    assert inside(engine, second.reference, "python", "-c", "import other_stack") == ""


def test_no_layer_holds_settings_caches_or_tools(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    secret = "s3cr3t-of-the-index"
    ca = tmp_path / "ca.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----\nAUTHORITY-OF-THE-TEST\n-----END CERTIFICATE-----\n")
    source = offline(tmp_path / "wheels", *WHEELS)
    config = f'no-index = true\nextra-index-url = ["http://user:{secret}@127.0.0.1:9/simple"]\n'
    source = replace(source, uv_config=config, ca=ca, secret=True)
    result = build_plan(
        make_plan(), lock_of(*WHEELS), make_spec(name="secrets"), options(source, base=base_image), engine=engine
    )
    image = engine.client.images.get(result.reference)
    assert secret not in json.dumps(image.history()) + json.dumps(image.attrs)
    names, found = [], []
    with tarfile.open(fileobj=io.BytesIO(b"".join(image.save()))) as archive:
        for layer in archive.getmembers():
            if not layer.name.endswith(".tar"):
                continue
            stream = archive.extractfile(layer)
            assert stream is not None
            data = stream.read()
            found += [word for word in (secret, "AUTHORITY-OF-THE-TEST") if word.encode() in data]
            with tarfile.open(fileobj=io.BytesIO(data)) as inner:
                names += [member.name.removeprefix("./") for member in inner if member.isfile()]
    assert found == []
    assert any(name.startswith("opt/envforge/env/") for name in names)
    assert [name for name in names if name.startswith(("run/", "root/.cache/", "opt/envforge/cache/", "tmp/"))] == []
    assert [name for name in names if "__pycache__" in name and name.startswith("opt/")] == []


def test_the_plain_dialect_builds_the_same_environment(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    result = build(engine, base_image, tmp_path, spec=make_spec(name="plain"), dialect="plain")
    script = "import torch, demo_stack, filelock; print(torch.__version__)"
    assert inside(engine, result.reference, "python", "-c", script, user="4711:0") == "2.13.0+cpu"
    assert inside(engine, result.reference, "sh", "-c", "ls /run/envforge/uv 2>/dev/null || echo none") == "none"
    layers = [row["Size"] for row in engine.client.images.get(result.reference).history()]
    assert max(layers[: len(layers) - 1]) < 20_000_000  # uv is 30 MB and more: it stayed in the builder


def test_a_base_without_the_python_is_told_before_anything_is_built(
    engine: DockerEngine, base_image: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as error:
        build(engine, base_image, tmp_path, plan=make_plan(python="3.12"))
    assert error.value.id == "base-python"
    assert "no Python 3.12" in error.value.cause
    assert "3.11" in error.value.cause


def test_a_base_that_nobody_has_is_an_outside_failure(engine: DockerEngine, tmp_path: Path) -> None:
    with pytest.raises(OutsideError) as error:
        build(engine, "envforge-test/nowhere:1", tmp_path)
    assert error.value.exit_code == 3
    assert "envforge-test/nowhere:1" in error.value.cause


def test_a_read_only_container_of_any_user_works(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    result = build(engine, base_image, tmp_path)
    script = "import os, tempfile; open(os.path.join(tempfile.gettempdir(), 'x'), 'w'); print(os.environ['HF_HOME'])"
    for tmpfs in ({"/tmp": ""}, {}):
        output = engine.client.containers.run(
            result.reference, ["python", "-c", script], user="12345:0", read_only=True, tmpfs=tmpfs,
            network_mode="none", remove=True, stderr=True,
        )  # fmt: skip
        place = "/tmp/" if tmpfs else "/dev/shm/"
        assert output.decode().startswith(place), output


def test_exit_codes_and_signals_pass_through_the_entrypoint(
    engine: DockerEngine, base_image: str, tmp_path: Path
) -> None:
    result = build(engine, base_image, tmp_path)
    assert engine.run(result.reference, ["python", "-c", "raise SystemExit(42)"]).code == 42
    script = (
        "import signal, sys, time; signal.signal(15, lambda *a: sys.exit(7)); print('up', flush=True); time.sleep(60)"
    )
    container = engine.client.containers.run(
        result.reference, ["python", "-c", script], detach=True, network_mode="none"
    )
    try:
        next(iter(container.logs(stream=True)))
        container.kill("SIGTERM")
        assert container.wait()["StatusCode"] == 7
    finally:
        container.remove(force=True)


def test_no_engine_is_told_with_the_way_on(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{sealed}/nobody.sock")
    with pytest.raises(EngineError) as error:
        build_plan(make_plan(), lock_of(DEMO), make_spec(), options(offline(sealed / "w", DEMO), engine="docker"))
    assert error.value.exit_code == 3
    assert "nobody.sock" in error.value.cause
    assert "venv" in error.value.hint
