"""A bundle rendered without engine and network. Stood in for: the base, of which only the bundle's row is needed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from lock_index import build_wheel

from envforge.cli.app import application
from envforge.cli.run import run
from envforge.image.address import content_address, image_tag
from envforge.image.values import BaseInfo, InstallSource
from envforge.keep.bundle import PROJECT, Filling, read_bundle
from envforge.lock import PipSettings
from envforge.lock.formats import LockedPackage, lock_hash
from envforge.project import write_plan
from envforge.resolver.plan import Plan, Target

PLAN = Plan(
    python="3.11",
    variant="cpu",
    tier="cpu",
    pins={"torch": "2.13.0"},
    requests=("demo",),
    target=Target(arch="x86_64", glibc=None, driver=None, driver_floor=None),
)
BASE = {"ref": "python:3.11-slim", "digest": "sha256:" + "ab" * 32, "id": "sha256:" + "cd" * 32}
BASE["name"] = "envforge-base:" + "cd" * 6
SYSTEM = {"libyaml-0-2": "0.2.5-1"}


def make_bundle(place: Path, base: dict[str, str] | None) -> tuple[Path, str]:
    """-> the bundle's folder and the name of its wheel."""
    project, folder = place / "project", place / "bundle"
    project.mkdir()
    (project / "image.yaml").write_text("schema: 1\nname: packed\nrequests: [demo]\nsystem_packages: [libyaml-0-2]\n")
    write_plan(project, PLAN)
    name, data = build_wheel("demo", "1.0")
    digest = hashlib.sha256(data).hexdigest()
    (place / name).write_bytes(data)
    locked = [LockedPackage("demo", "1.0", "default", (f"sha256:{digest}",), name)]
    (project / "pylock.toml").write_text(
        f'lock-version = "1.0"\n[[packages]]\nname = "demo"\nversion = "1.0"\nwheels = [{{url = "https://x.example/'
        f'{name}", hashes = {{sha256 = "{digest}"}}}}]\n[tool.envforge]\nlock = "{lock_hash(locked)}"\n'
        f'plan = "{PLAN.hash()}"\n'
    )
    filling = Filling(project, folder, PipSettings(), InstallSource(""))
    plan, lock, _ = filling.start()
    (folder / "wheels" / name).write_bytes(data)
    (folder / "debs").mkdir()
    (folder / "debs" / "Packages").write_text("")
    filling.finish(plan, lock, base, SYSTEM)
    return folder, name


def test_a_bundle_renders_as_build_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody answers there, and nobody is asked
    folder, wheel = make_bundle(tmp_path, BASE)
    words = ["render", "--wheelhouse", str(folder), "-o", str(tmp_path / "out"), "--json"]
    assert run(application(), words) == 0
    out, err = capsys.readouterr()
    dockerfile = (tmp_path / "out" / "Dockerfile").read_text()
    assert f"FROM {BASE['name']} AS runtime" in dockerfile and "libyaml-0-2=0.2.5-1" in dockerfile
    assert (tmp_path / "out" / "uv.toml").read_text() == "no-index = true\n"
    assert (tmp_path / "out/build/parts/stack/wheels" / wheel).is_file()
    assert (tmp_path / "out/build/debs/Packages").is_file()
    bundle = read_bundle(folder)
    built_on = BaseInfo(BASE["name"], BASE["digest"])
    address = content_address(PLAN, bundle.lock, bundle.spec, built_on, "image", SYSTEM)
    assert json.loads(out)["tag"] == image_tag(PLAN, bundle.lock, bundle.spec, address), "the same name as build's"
    assert f"tar -C {folder}/base" in err


def test_what_a_bundle_cannot_be_rendered_from_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make_bundle(tmp_path, None)
    words = ["render", "--wheelhouse", str(folder), "-o", str(tmp_path / "out")]
    assert run(application(), words) == 2 and "holds no base image" in capsys.readouterr().err
    assert (
        run(application(), [*words, "transformers"]) == 2 and "something else is asked for" in capsys.readouterr().err
    )
    assert run(application(), [*words, "--driver", "550.54.15", "--gpu", "A100"]) == 2
    assert "--driver, --gpu describes other hosts" in capsys.readouterr().err
    (folder / PROJECT / "image.yaml").write_text("schema: 1\n")
    assert run(application(), words) == 2 and "damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
