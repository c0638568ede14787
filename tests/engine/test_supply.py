"""Supply chain on a real engine: one image id twice, the list of contents, a read-only root with mounted caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from standins import lock_of, make_plan, make_spec, offline, options, own_wheels

from envforge.image.build import build_plan
from envforge.image.engines.docker import DockerEngine
from envforge.image.values import BuildResult

pytestmark = [pytest.mark.engine]


def build(engine: DockerEngine, base: str, tmp: Path, anew: bool = False, **changes: object) -> BuildResult:
    """One image of stand-ins; `anew`: from nothing that an earlier build left in the builder's cache."""
    if anew:
        engine.client.api.prune_builds(all=True)
    wheels = own_wheels("supply")
    source = offline(tmp / "wheels", *wheels)
    spec = make_spec(name="supply", env={"A": "1"})
    return build_plan(
        make_plan(), lock_of(*wheels), spec, options(source, base=base, rebuild=True, **changes), engine=engine
    )


@pytest.mark.parametrize("dialect", ["buildkit", "plain"])
def test_the_same_image_id_twice(engine: DockerEngine, base_image: str, tmp_path: Path, dialect: str) -> None:
    ids = []
    for i, epoch in enumerate((1_700_000_000, 1_700_000_000, 1_700_000_001)):
        result = build(engine, base_image, tmp_path, i == 1, reproducible=True, epoch=epoch, dialect=dialect)
        image = engine.client.images.get(result.reference)
        assert image.id == result.digest
        # What was built before the times were taken out is gone; the classic builder's steps are its cache.
        if not ids and dialect == "buildkit":
            mine = {"dangling": True, "label": f"envforge.address={result.address}"}
            assert not engine.client.images.list(filters=mine)
        ids.append(result.digest)
    assert ids[0] == ids[1]
    assert ids[2] != ids[0]
    assert image.attrs["Created"].startswith("2023-11-14T22:13:21")
    base = engine.client.images.get(base_image).attrs["RootFS"]["Layers"]
    assert image.attrs["RootFS"]["Layers"][: len(base)] == base, "the base's layers are shared with everybody"
    script = "import os, torch; print(int(os.stat(torch.__file__).st_mtime), os.environ['A'])"
    assert engine.run(result.reference, ["python", "-c", script]).output == "1700000001 1"


def test_without_it_times_differ_and_nothing_else(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    trees = []
    for i in range(2):
        result = build(engine, base_image, tmp_path, i == 1)
        words = ["sh", "-c", "cd / && find opt usr var workspace -type f -exec sha256sum {} + | sort -k2"]
        trees.append((result.digest, engine.run(result.reference, words, user="0:0").output))
    assert trees[0][0] != trees[1][0]
    assert trees[0][1] == trees[1][1]


def test_the_list_of_contents_is_in_the_image_and_beside_it(
    engine: DockerEngine, base_image: str, tmp_path: Path
) -> None:
    result = build(engine, base_image, tmp_path)
    assert result.sbom is not None
    outer = {row["name"]: row for row in json.loads(result.sbom.read_text())["components"]}
    assert {"torch", "demo-stack", "filelock", "libc6", "python3.11"} <= set(outer)
    place = engine.client.images.get(result.reference).labels["envforge.sbom"].split("@")[0]
    inner = {row["name"] for row in json.loads(engine.run(result.reference, ["cat", place]).output)["components"]}
    assert {"torch", "demo-stack", "filelock"} <= inner


def test_a_read_only_root_with_mounted_caches_works(engine: DockerEngine, base_image: str, tmp_path: Path) -> None:
    result = build(engine, base_image, tmp_path)
    mounts = {}
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        folder = tmp_path / name
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        mounts[str(folder)] = {"bind": f"/mnt/{name}", "mode": "rw"}
    script = (
        "import os\n"
        "for name in ('HF_HOME', 'TRITON_CACHE_DIR', 'TORCHINDUCTOR_CACHE_DIR', 'MPLCONFIGDIR'):\n"
        "    os.makedirs(os.environ[name], exist_ok=True)\n"
        "    open(os.path.join(os.environ[name], 'written'), 'w').close()\n"
        "print(os.environ['HF_HOME'], os.environ['TRITON_CACHE_DIR'])\n"
    )
    output = engine.client.containers.run(
        result.reference, ["python", "-c", script], user="12345:0", read_only=True, network_mode="none", remove=True,
        environment={"HF_HOME": "/mnt/HF_HOME", "TRITON_CACHE_DIR": "/mnt/TRITON_CACHE_DIR"}, volumes=mounts,
    )  # fmt: skip
    assert output.decode().split() == ["/mnt/HF_HOME", "/mnt/TRITON_CACHE_DIR"]
    assert (tmp_path / "HF_HOME" / "written").exists()
    assert (tmp_path / "TRITON_CACHE_DIR" / "written").exists()
