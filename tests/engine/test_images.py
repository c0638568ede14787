"""envforge images on a real engine: what is there, what suits a host, taking over, handing on, taking away."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from engine_daemon import CannotStart
from engine_registry import own_registry
from standins import WHEELS, lock_of, make_plan, make_spec, offline, options

from envforge.cli.app import application
from envforge.cli.outcome import write_build
from envforge.cli.run import run
from envforge.errors import NoError, OutsideError
from envforge.image import render
from envforge.image.adopt import adopt
from envforge.image.build import build_plan
from envforge.image.engines.docker import DockerEngine
from envforge.image.export import export, file_name
from envforge.image.values import BuildResult
from envforge.resolver.plan import Target

pytestmark = [pytest.mark.engine]

CPU = make_plan(pins={"torch": "2.13.0"})
GPU = make_plan(
    variant="cu126", tier="minor", cuda="12.6", pins={"torch": "2.7.1"},
    target=Target(arch="x86_64", glibc="2.31", driver="550.54.15", driver_floor="525.60.13", sm=("8.0",)),
)  # fmt: skip


def images(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    """`envforge images ... --json`, which must end with that code."""
    capsys.readouterr()
    got = run(application(), ["images", *map(str, words), "--engine", "docker", "--json"])
    out, err = capsys.readouterr()
    assert got == code, err
    found: dict[str, Any] = json.loads(out) if out else {"error": err}
    return found


def build(base: str, tmp: Path, name: str, plan: object = CPU, **changes: object) -> BuildResult:
    """One image of stand-ins; system packages of GPU images are not under test here."""
    source = offline(tmp / "wheels", *WHEELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "system_packages", lambda plan, lock: ())
        made = options(source, base=base, **{key: value for key, value in changes.items() if key != "env"})
        spec = make_spec(name=name, env=changes.get("env", {}))
        return build_plan(plan, lock_of(*WHEELS), spec, made, engine=DockerEngine())  # type: ignore[arg-type]


def test_list_names_each_image_and_find_says_which_suits_a_host(
    engine: DockerEngine, base_image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu, gpu = build(base_image, tmp_path, "list-cpu"), build(base_image, tmp_path, "list-gpu", GPU)
    rows = {row["reference"]: row for row in images(capsys, "list")["images"]}
    assert rows[gpu.reference]["digest"] == gpu.digest
    assert rows[gpu.reference]["driver_floor"] == "525.60.13"
    assert rows[gpu.reference]["sm"] == ["8.0"]
    assert rows[cpu.reference]["driver_floor"] is None

    def suits(*words: str, code: int = 0) -> tuple[set[str], dict[str, str]]:
        found = [row for row in images(capsys, "find", *words, code=code)["images"] if row["stack"].startswith("list-")]
        why = {row["stack"]: " ".join(reason["text"] for reason in row["why_not"]) for row in found}
        return {row["stack"] for row in found if row["suits"]}, why

    assert suits("--driver", "550.54.15", "--gpu", "sm_80")[0] == {"list-gpu"}
    assert suits("--driver", "none")[0] == {"list-cpu"}
    fits, why = suits("--driver", "470.57.02", "--gpu", "sm_80", code=1)
    assert not fits
    assert "driver 525.60.13" in why["list-gpu"]
    assert "sm_120" in suits("--driver", "580.65.06", "--gpu", "sm_120", code=1)[1]["list-gpu"]


def test_an_image_of_a_ci_is_taken_over_if_it_is_what_the_plan_says(
    engine: DockerEngine, base_image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        with own_registry(tmp_path / "registry") as registry:
            made = build(base_image, tmp_path, "ci", registry=registry.host, push=True)
            assert made.registry is not None
            engine.client.images.remove(made.digest, force=True)  # the CI's machine is another one
            project = tmp_path / "project"
            project.mkdir()
            (project / "plan.json").write_text(CPU.dumps())
            answer = images(capsys, "adopt", made.registry["image"], project)
            assert answer["reference"] == made.reference
            assert answer["registry"]["digest"] == made.registry["digest"]
            kept = json.loads((project / "build.json").read_text())
            assert (kept["digest"], kept["address"], kept["plan_hash"]) == (made.digest, made.address, CPU.hash())
    except CannotStart as reason:
        pytest.skip(str(reason))
    # From now on it counts as built, and a project uses it.
    assert build(base_image, tmp_path, "ci").reused
    rows = {row["reference"]: row for row in images(capsys, "list")["images"]}
    assert rows[made.reference]["projects"] == [str(project)]
    # Another plan says something else.
    (project / "plan.json").write_text(make_plan(python="3.12", pins={"torch": "2.12.0", "peft": "0.19.1"}).dumps())
    error = images(capsys, "adopt", made.reference, project, code=1)["error"]
    for words in ("Python is 3.11", "torch is 2.13.0+cpu, the plan says 2.12.0", "peft 0.19.1 is not installed"):
        assert words in error


def test_an_image_without_labels_is_asked_for_its_packages(engine: DockerEngine, base_image: str) -> None:
    with pytest.raises(NoError, match=r"torch 2\.13\.0 is not installed"):
        adopt(engine, base_image, CPU)
    taken = adopt(engine, base_image, make_plan(pins={}))
    assert taken.name is None
    found = engine.inspect(base_image)
    assert found is not None
    assert not any(name.startswith("envforge/") for name in found.names)


def test_check_looks_into_an_image_whoever_built_it(
    engine: DockerEngine, base_image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = build(base_image, tmp_path, "checked")

    def checked(reference: str, *target: str, code: int) -> str:
        capsys.readouterr()
        assert run(application("check"), ["check", reference, *target]) == code, capsys.readouterr().err
        return capsys.readouterr().out

    assert "runs" in checked(made.reference, "--driver", "none", code=0)
    assert "the GPUs there stay unused" in checked(made.reference, "--driver", "550.54.15", "--gpu", "sm_80", code=0)
    said = checked(made.reference, "--driver", "none", "--glibc", "2.17", code=1)
    assert "does not run" in said and "glibc" in said
    assert "runs" in checked(base_image, "--driver", "none", code=0), "nothing in it that could not run"


def test_an_oci_archive_and_a_squashfs_hold_the_built_image(
    engine: DockerEngine, base_image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = build(base_image, tmp_path, "export", env={"ASKED": "a $HOME 'b' \"c\""})
    image = engine.inspect(made.reference)
    assert image is not None
    place = tmp_path / "to: here"  # a colon, which these tools read as an end
    first = images(capsys, "export", made.reference, "--to", "oci-archive", "-o", place)
    assert not first["reused"]
    assert made.digest.removeprefix("sha256:")[:16] in Path(first["path"]).name
    with tarfile.open(first["path"]) as archive:
        index = json.load(archive.extractfile("index.json"))  # type: ignore[arg-type]
        manifest = read_blob(archive, index["manifests"][0]["digest"])
        config = read_blob(archive, manifest["config"]["digest"])
    assert config["config"]["Labels"]["envforge.address"] == made.address

    # Two at once do the work once; what a killed one left is swept away.
    (place / f".{file_name(image, 'sqsh')}.part-1").write_bytes(b"half")
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(export(DockerEngine(), image, "sqsh", place))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(result.reused for result in results) == [False, True]
    path = results[0].path
    assert sorted(p.name for p in place.iterdir() if not p.name.endswith(".lock")) == sorted(
        [path.name, Path(first["path"]).name]
    )
    out = tmp_path / "root"
    subprocess.run(["unsquashfs", "-quiet", "-no-progress", "-d", str(out), str(path)], check=True, capture_output=True)
    assert "ASKED=a $HOME 'b' \"c\"" in (out / "etc" / "environment").read_text().splitlines()
    assert "/opt/envforge/bin/envforge-entrypoint" in (out / "etc" / "rc").read_text()
    answer = subprocess.run(
        ["chroot", str(out), "/opt/envforge/env/bin/python", "-c", "import torch; print(torch.__version__)"],
        capture_output=True, text=True, check=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    assert answer.stdout.strip() == "2.13.0+cpu"


def read_blob(archive: tarfile.TarFile, digest: str) -> dict[str, Any]:
    stream = archive.extractfile(f"blobs/{digest.replace(':', '/')}")
    found: dict[str, Any] = json.load(io.BytesIO(stream.read()))  # type: ignore[union-attr]
    return found


def test_a_sif_is_made_by_apptainer_and_nothing_stays_when_that_fails(
    engine: DockerEngine, base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stood in for: apptainer, by a script that records its words and writes a file where it was told to."""
    image = engine.inspect(build(base_image, tmp_path, "sif").reference)
    assert image is not None
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(OutsideError) as error:
            export(engine, image, "sif", tmp_path / "out")
        assert error.value.id == "no-tool"
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\ntar -tf "${{4#*:}}" >/dev/null || exit 9\n'
        '[ -z "$FAIL" ] || { echo half >"$3"; echo "FATAL: no"; exit 1; }\necho sif >"$3"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(OutsideError, match="FATAL: no"):
        export(engine, image, "sif", tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir() if not p.name.endswith(".lock")] == []
    monkeypatch.delenv("FAIL")
    done = export(engine, image, "sif", tmp_path / "out")
    assert done.path.read_text() == "sif\n"
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:2] + words[3:] == ["build", "--force", "docker-archive:image.tar"]


def test_prune_takes_what_nobody_uses_and_nothing_else(
    engine: DockerEngine, base_image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = build(base_image, tmp_path, "prune", env={"AGE": "old"})
    used = build(base_image, tmp_path, "prune", env={"AGE": "used"})
    named = build(base_image, tmp_path, "prune", env={"AGE": "named"}, tag="mine/prune:1")
    new = build(base_image, tmp_path, "prune", env={"AGE": "new"})
    project = tmp_path / "project"
    project.mkdir()
    write_build(project, used, "p", "l")
    assert "--yes" in images(capsys, "prune", code=2)["error"]  # nobody to ask
    assert engine.inspect(old.reference) is not None
    removed = set(images(capsys, "prune", "--yes")["removed"])
    assert old.reference in removed
    assert not removed & {used.reference, named.reference, new.reference}
    assert engine.inspect(old.reference) is None
    # The project lets go of it, and the newest goes only when asked for.
    (project / "build.json").unlink()
    removed = set(images(capsys, "prune", "--all", "--yes")["removed"])
    assert {used.reference, new.reference} <= removed
    assert engine.inspect("mine/prune:1") is not None


@pytest.mark.parametrize("name", ["a;id", "$(id)", "a b", "--help-me", "a\nb", "../x"])
def test_a_hostile_name_is_bad_input_and_reaches_no_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    for words in (("adopt", "--", name), ("export", "--to", "sqsh", "--", name)):
        capsys.readouterr()
        assert run(application(), ["images", *words]) == 2
        assert "is not an image reference" in capsys.readouterr().err
