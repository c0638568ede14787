"""Bundles, mirrors and secrets on a real engine: a build whose network is cut, and what must not stay in a layer."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from engine_index import Index, Wheel
from standins import FILELOCK, TORCH, lock_of, make_plan, make_spec, offline, options, own_wheels

from envforge.errors import DataError, IndexUnreachableError, OutsideError, UsageError
from envforge.image.build import build_plan
from envforge.image.engines.docker import DockerEngine, find_client
from envforge.image.values import LABEL_ADDRESS
from envforge.keep.bundle import read_bundle
from envforge.lock.formats import LockedPackage, lock_hash
from envforge.lock.read import read_lock
from envforge.project import write_plan
from envforge.resolver.plan import Plan

pytestmark = [pytest.mark.engine]

SYSTEM = "libyaml-0-2"  # small, needs libc only, and not in the base


def envforge(*words: str, cut: bool = False) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own; `cut`: in a network namespace without any network."""
    argv = [
        *(["unshare", "--net"] if cut else []),
        sys.executable,
        "-c",
        "from envforge.cli import main; main()",
        *words,
    ]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=dict(os.environ))


def make_project(folder: Path, index: Index, wheels: tuple[Wheel, ...], plan: Plan, system: str = "") -> Path:
    """A project with a plan and a lock whose files the index serves."""
    folder.mkdir(parents=True)
    (folder / "own.txt").write_text("content")
    packages = f"system_packages: [{system}]\n" if system else ""
    (folder / "image.yaml").write_text(
        f"schema: 1\nname: packed\nrequests: [demo-stack]\n{packages}files: {{/opt/own.txt: own.txt}}\n"
    )
    write_plan(folder, plan)
    rows = sorted(wheels, key=lambda wheel: wheel.name)
    locked = [LockedPackage(w.name, w.version, "default", (f"sha256:{w.sha256}",), w.file) for w in rows]
    files = index.url.replace("/simple", "/files")
    text = 'lock-version = "1.0"\n' + "".join(
        f'[[packages]]\nname = "{w.name}"\nversion = "{w.version}"\nwheels = [{{url = "{files}/{w.file}", '
        f'size = {len(w.data)}, hashes = {{sha256 = "{w.sha256}"}}}}]\n'
        for w in rows
    )
    text += f'[tool.envforge]\nlock = "{lock_hash(locked)}"\nplan = "{plan.hash()}"\n'
    (folder / "pylock.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, daemon: object, base_image: str) -> tuple[Path, Path]:
    """A project and its bundle, made once: with a system package from the base's own archive."""
    place = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch, Index(*own_wheels("packed")) as index:
        patch.setenv("DOCKER_HOST", daemon.host)  # type: ignore[attr-defined]
        patch.setenv("XDG_STATE_HOME", str(place / "state"))
        project = make_project(place / "project", index, own_wheels("packed"), make_plan(), SYSTEM)
        words = ("bundle", str(project), str(place / "bundle"), "--engine", "docker", "--base", base_image)
        done = envforge(*words, "--model", "none")
        assert done.returncode == 0, done.stderr[-3000:]
        asked = len(index.asked)
        # Again, after it broke off: what is whole is not fetched again.
        (place / "bundle" / "bundle.json").unlink()
        (place / "bundle" / "wheels" / TORCH.file).write_bytes(b"half")
        done = envforge(*words, "--model", "none", "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        assert index.asked[asked:] == [f"/files/{TORCH.file}"]
        assert json.loads(done.stdout)["system"].keys() == {SYSTEM}
    return project, place / "bundle"


def test_a_bundle_builds_with_the_network_cut(packed: tuple[Path, Path], engine: DockerEngine, base_image: str) -> None:
    _, bundle = packed
    done = envforge(
        "build",
        "--wheelhouse",
        str(bundle),
        "--engine",
        "docker",
        "--network",
        "none",
        "--no-verify",
        "--json",
        cut=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["reference"].startswith("envforge/packed:2.13.0-cpu-")
    script = (
        "import torch, demo_stack as d, importlib.metadata as m; print(m.version('torch'), open('/opt/own.txt').read())"
    )
    assert engine.run(result["reference"], ["python", "-c", script]).output == "2.13.0+cpu content"
    assert engine.run(result["reference"], ["dpkg-query", "-W", "-f", "${Status}", SYSTEM]).output.endswith("installed")
    # The base is the same content as outside: what was built here is found by a build with network.
    base = json.loads((bundle / "bundle.json").read_text())["base"]
    assert base["digest"] == engine.base(base_image, "3.11").digest


def test_a_rendered_bundle_builds_by_hand_to_the_same_address(
    packed: tuple[Path, Path], engine: DockerEngine, tmp_path: Path
) -> None:
    _, bundle = packed
    done = envforge("render", "--wheelhouse", str(bundle), "-o", str(tmp_path / "context"), "--json", cut=True)
    assert done.returncode == 0, done.stderr[-3000:]
    with (tmp_path / "base.tar").open("wb") as archive:  # the command that render names
        subprocess.run(["tar", "-C", str(bundle / "base"), "-c", "."], stdout=archive, check=True)
    engine.load(tmp_path / "base.tar")
    tag = json.loads(done.stdout)["tag"]
    argv = [str(find_client().path), "build", "--network=none", "--secret", "id=uv.toml,src=uv.toml", f"--tag={tag}"]
    built = subprocess.run(
        [*argv, "."],
        cwd=tmp_path / "context",
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    info = engine.inspect(tag)
    assert info is not None and info.labels[LABEL_ADDRESS].startswith(tag.rpartition("-")[2])
    words = ("build", "--wheelhouse", str(bundle), "--engine", "docker", "--network", "none", "--no-verify", "--json")
    found = envforge(*words, cut=True)
    assert found.returncode == 0, found.stderr[-3000:]
    result = json.loads(found.stdout)
    assert (result["reused"], result["digest"]) == (True, info.id), "build finds it by its address"


def test_the_project_of_a_bundle_may_be_named_and_nothing_else(packed: tuple[Path, Path], engine: DockerEngine) -> None:
    project, bundle = packed
    words = ("--wheelhouse", str(bundle), "--engine", "docker", "--network", "none", "--no-verify", "--json")
    done = envforge("build", str(project), *words, cut=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((project / "build.json").read_text())["plan_hash"] == make_plan().hash()
    done = envforge("build", "transformers", "--variant", "cpu", *words, cut=True)
    assert done.returncode == 2
    assert "something else is asked for" in done.stderr


def test_secrets_are_in_no_layer_and_no_history(
    packed: tuple[Path, Path], engine: DockerEngine, base_image: str, tmp_path: Path
) -> None:
    ca = tmp_path / "ca, of the test.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----\nAUTHORITY-OF-THE-TEST\n-----END CERTIFICATE-----\n")
    planted = ("s3cr3t-of-the-index", "s3cr3t-of-the-archive", "AUTHORITY-OF-THE-TEST")
    source = replace(
        offline(tmp_path / "wheels", *own_wheels("secret")),
        uv_config=f'no-index = true\nextra-index-url = ["http://user:{planted[0]}@127.0.0.1:9/simple"]\n',
        apt=f"http://user:{planted[1]}@127.0.0.1:9",
        ca=ca,
        secret=True,
        debs=packed[1] / "debs",
    )
    spec = make_spec(name="planted", system_packages=(SYSTEM,))
    result = build_plan(
        make_plan(),
        lock_of(*own_wheels("secret")),
        spec,
        options(source, base=base_image, network="none"),
        engine=engine,
    )
    image = engine.client.images.get(result.reference)
    texts = [json.dumps(image.history()), json.dumps(image.attrs), result.log.read_text() if result.log else ""]
    assert not [word for word in planted for text in texts if word in text]
    names: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(b"".join(image.save()))) as archive:
        for member in archive.getmembers():
            stream = archive.extractfile(member) if member.isfile() else None
            data = stream.read() if stream else b""
            assert not [word for word in planted if word.encode() in data], member.name
            if member.name.endswith(".tar"):
                with tarfile.open(fileobj=io.BytesIO(data)) as layer:
                    names += [file.name for file in layer if file.isfile()]
    assert any(SYSTEM.split("-")[0] in name for name in names), "the step that had the secrets did run"
    assert not [name for name in names if name.endswith((".deb", "apt.mirror", "uv.toml")) or name.startswith("run/")]


def test_a_mirror_of_the_archive_stands_in_place_of_its_host(
    engine: DockerEngine, base_image: str, tmp_path: Path
) -> None:
    with Index() as index:  # serves nothing of the kind: what counts is that it is asked, and under which path
        source = replace(offline(tmp_path / "w", *own_wheels("m")), apt=index.url.replace("/simple", "/mirror"))
        spec = make_spec(name="mirrored", system_packages=("libyaml-dev",))
        with pytest.raises(OutsideError) as error:
            build_plan(make_plan(), lock_of(TORCH, FILELOCK), spec, options(source, base=base_image), engine=engine)
        assert error.value.exit_code == 3
        assert any(path.startswith("/mirror/") and "/dists/bookworm/" in path for path in index.asked), index.asked


def test_a_damaged_or_unfinished_bundle_is_refused(packed: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(packed[1], copy)
    plan = read_bundle(copy).plan
    assert plan == make_plan()
    blob = max((copy / "base/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    with blob.open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"\xff\xff\xff")
    with pytest.raises(DataError) as error:
        read_bundle(copy)
    assert blob.name in error.value.cause
    (copy / "bundle.json").unlink()
    with pytest.raises(UsageError) as unfinished:
        read_bundle(copy)
    assert "not finished" in unfinished.value.cause


def test_an_index_that_is_down_ends_a_bundle_and_keeps_what_is_there(tmp_path: Path, engine: DockerEngine) -> None:
    with Index(*own_wheels("down")) as index:
        project = make_project(tmp_path / "project", index, own_wheels("down"), make_plan())
        index.mode = "cut"
        done = envforge("bundle", str(project), str(tmp_path / "bundle"), "--engine", "docker", "--model", "none")
    assert done.returncode == IndexUnreachableError.exit_code, done.stderr
    assert "cannot be fetched" in done.stderr
    assert not (tmp_path / "bundle" / "bundle.json").exists()
    assert not list((tmp_path / "bundle" / "wheels").glob("*.whl"))


def test_a_lock_that_is_read_back_is_the_same(tmp_path: Path) -> None:
    with Index(*own_wheels("x")) as index:
        project = make_project(tmp_path / "project", index, own_wheels("x"), make_plan())
    lock = read_lock(project, make_plan())
    assert lock.requirements.splitlines()[1:] == lock_of(*own_wheels("x")).requirements.splitlines()
    (project / "pylock.toml").write_text((project / "pylock.toml").read_text().replace("1.0", "2.0"))
    with pytest.raises(DataError):
        read_lock(project, make_plan())
    with pytest.raises(DataError) as error:
        read_lock(project, make_plan(python="3.12"))
    assert "another plan" in error.value.cause


def test_a_bundle_for_the_folder_engine_needs_no_container(sealed: Path, tmp_path: Path) -> None:
    plan = make_plan(python=f"{sys.version_info.major}.{sys.version_info.minor}")
    with Index(*own_wheels("folder")) as index:
        project = make_project(tmp_path / "project", index, own_wheels("folder"), plan)
        done = envforge("bundle", str(project), str(tmp_path / "bundle"), "--engine", "venv", "--model", "none")
        assert done.returncode == 0, done.stderr
    words = ("build", "--wheelhouse", str(tmp_path / "bundle"), "--engine", "venv", "--output", str(tmp_path / "env"))
    done = envforge(*words, "--base", sys.executable, "--no-verify", cut=True)
    assert done.returncode == 0, done.stderr
    entry = tmp_path / "env" / "bin" / "envforge-entrypoint"
    script = "import torch, demo_stack, importlib.metadata as m; print(m.version('torch'))"
    answer = subprocess.run([str(entry), "python", "-c", script], capture_output=True, text=True, check=False)
    assert answer.stdout.strip() == "2.13.0+cpu", answer.stderr
