"""podman and buildah for real, on a store of their own: build in both dialects, reuse, hostile values, push, save."""

from __future__ import annotations

import json
import signal
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_base import BASE
from engine_daemon import CannotStart
from engine_index import Index
from engine_registry import own_registry
from engine_store import own_store
from standins import WHEELS, lock_of, make_plan, make_spec, offline, options, own_wheels
from test_docker import HOSTILE
from test_faults import children_of, start_build, wait_gone

from envforge.errors import EngineError, OutsideError
from envforge.image.build import build_plan
from envforge.image.engines import ContainerEngine, Mount, make_engine
from envforge.image.registry import Registry, RegistryError, parse_reference
from envforge.image.values import BuildResult

pytestmark = [pytest.mark.engine]
SECRET = "s3cr3t-of-the-index"


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """The variables of a store with the base image in it."""
    try:
        with own_store() as env:
            yield env
    except CannotStart as reason:
        pytest.skip(str(reason))


@pytest.fixture
def podman(store: dict[str, str], sealed: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerEngine:
    """envforge's podman engine on that store."""
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    engine = make_engine("podman")
    assert engine.available().ok
    return engine  # type: ignore[return-value]


@pytest.fixture
def buildah(podman: ContainerEngine, monkeypatch: pytest.MonkeyPatch) -> ContainerEngine:
    """envforge's buildah engine on the same store, without namespaces."""
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    engine = make_engine("buildah")
    if not engine.available().ok:
        pytest.skip(engine.available().reason)
    return engine  # type: ignore[return-value]


def build(engine: ContainerEngine, tmp: Path, name: str, **changes: object) -> BuildResult:
    """One image of stand-ins."""
    spec = changes.pop("spec", make_spec(name=name))
    source = replace(offline(tmp / "wheels", *WHEELS), uv_config=changes.pop("config", "no-index = true\n"))  # type: ignore[arg-type]
    made = options(source, base=BASE, engine=engine.name, **changes)
    return build_plan(make_plan(), lock_of(*WHEELS), spec, made, engine=engine)  # type: ignore[arg-type]


def test_podman_builds_what_docker_builds(podman: ContainerEngine, tmp_path: Path) -> None:
    folder = tmp_path / "spec"
    folder.mkdir()
    (folder / "$(x) [a] *.txt").write_text("content")
    target = "/opt/data/$HOME \"q\" 'x' \\ [a]*.txt"
    spec = make_spec(name="pod", env={"HOSTILE": HOSTILE}, files={target: "$(x) [a] *.txt"}, folder=folder)
    config = f'no-index = true\nextra-index-url = ["http://user:{SECRET}@127.0.0.1:9/simple"]\n'
    result = build(podman, tmp_path, "pod", spec=spec, config=config)
    assert result.reference.startswith("envforge/pod:2.13.0-cpu-")
    script = (
        "import json, os, torch; print(json.dumps([os.getuid(), torch.__version__, os.environ['HOSTILE'],"
        " os.listdir('/opt/data'), os.listdir('/tmp'), os.environ['ASKED'], os.listdir('/mine')]))"
    )
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "here").touch()
    for user in (None, "12345:0"):
        answer = podman.run(
            result.reference,
            ["python", "-c", script],
            user=user,
            env={"ASKED": HOSTILE},
            mounts=(Mount(mine, "/mine"),),
        )
        assert answer.code == 0, answer.output
        found = json.loads(answer.output.splitlines()[-1])
        assert found == [
            int((user or "1000:0").split(":")[0]), "2.13.0+cpu", HOSTILE,
            ["$HOME \"q\" 'x' \\ [a]*.txt"], [], HOSTILE, ["here"],
        ]  # fmt: skip
    # What a command writes is fetched, its exit code passes through, and nothing of it stays.
    write = "open('/workspace/x', 'w').write('y'); raise SystemExit(42)"
    outcome = podman.run(result.reference, ["python", "-c", write], fetch="/workspace/x")
    assert (outcome.code, outcome.fetched) == (42, b"y")
    image = podman.inspect(result.reference)
    assert image is not None
    assert image.labels["envforge.address"] == result.address
    assert image.labels["envforge.plan"].startswith('{"as_of"')
    again = build(podman, tmp_path, "pod", spec=spec)
    assert (again.reused, again.digest) == (True, result.digest)
    assert SECRET not in json.dumps(image.labels) + everything(podman, result, tmp_path / "saved.tar")
    podman.remove(result.reference)
    assert podman.inspect(result.reference) is None


def test_another_lock_gets_its_own_packages_and_not_those_of_the_cache(podman: ContainerEngine, tmp_path: Path) -> None:
    """Same names, same versions, other bytes: only what the steps' mounts show differs."""
    for salt in ("one", "two"):
        wheels = own_wheels(salt)
        made = options(offline(tmp_path / salt, *wheels), base=BASE, engine="podman")
        result = build_plan(make_plan(), lock_of(*wheels), make_spec(name="keyed"), made, engine=podman)
        script = "import torch, demo_stack; print(open(torch.__file__).read(), open(demo_stack.__file__).read())"
        answer = podman.run(result.reference, ["python", "-c", script])
        assert answer.output.split() == ["#", salt] * 2


def everything(engine: ContainerEngine, result: BuildResult, path: Path) -> str:
    """All bytes of an image: configuration, history and layers."""
    image = engine.inspect(result.digest)
    assert image is not None
    engine.save(image, path)
    found = []
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            found.append(stream.read().decode("latin-1") if stream else "")
    assert any("envforge.address" in text for text in found)
    return "".join(found)


def test_buildah_builds_the_plain_dialect_and_pushes_it(buildah: ContainerEngine, tmp_path: Path) -> None:
    result = build(buildah, tmp_path, "plain-bud", dialect="plain")
    answer = buildah.run(result.reference, ["python", "-c", "import torch, demo_stack; print(torch.__version__)"])
    assert answer.output.splitlines()[-1] == "2.13.0+cpu"
    assert [image.id for image in buildah.find("envforge.address", result.address)] == [result.digest]
    try:
        with own_registry(tmp_path / "registry") as registry:
            pushed = build(buildah, tmp_path, "plain-bud", dialect="plain", registry=registry.host, push=True)
            assert pushed.registry is not None
            remote = Registry(registry.host).find(parse_reference(pushed.registry["image"]))
            assert remote is not None
            assert remote.labels["envforge.address"] == result.address
            assert remote.digest == pushed.registry["digest"]
            # Another machine: nothing here, so nothing is built.
            buildah.remove(result.reference)
            elsewhere = build(buildah, tmp_path, "plain-bud", dialect="plain", registry=registry.host)
            assert (elsewhere.here, elsewhere.reference) == (False, pushed.registry["image"])
            assert buildah.pull(elsewhere.reference).labels["envforge.address"] == result.address
        with pytest.raises(RegistryError, match=r"refused|connect"):
            buildah.pull(f"{registry.host}/other:1")
    except CannotStart as reason:
        pytest.skip(str(reason))


def test_a_runtime_that_fails_is_not_taken_for_a_bad_base(podman: ContainerEngine, tmp_path: Path) -> None:
    words = ["/nowhere/to-be-found"]
    image = podman.inspect(BASE)
    assert image is not None
    with pytest.raises(EngineError, match="cannot run a container here"):
        podman.ask(image, words)
    assert podman.ask(image, ["/bin/sh", "-c", "echo Error: mine; exit 3"]).code == 3


def test_a_base_that_nobody_has_is_an_outside_failure(podman: ContainerEngine, tmp_path: Path) -> None:
    with pytest.raises(OutsideError) as error:
        podman.base("127.0.0.1:9/none:1", "3.11")
    assert error.value.id == "base"
    assert podman.inspect("envforge-test/none:1") is None


def test_a_stopped_build_leaves_no_process_and_is_never_taken_for_a_good_one(podman: ContainerEngine) -> None:
    with Index(*own_wheels("stopped")) as index:
        index.mode = "stall"
        stopped = start_build(index, BASE, "stopped", "podman")
        index.wait_for_download()
        children = children_of(stopped.pid)
        stopped.send_signal(signal.SIGINT)
        stopped.communicate(timeout=60)
        assert stopped.returncode == 130
        assert wait_gone(children) == []  # the step's container too, which has a session of its own
        assert not [name for image in podman.images() for name in image.names if name.startswith("envforge/stopped:")]
        index.mode = "good"
        again = start_build(index, BASE, "stopped", "podman")
        out, err = again.communicate(timeout=180)
        assert again.returncode == 0, err
        assert json.loads(out)["reused"] is False
