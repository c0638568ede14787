"""What can be had here, as a record: stand-in indexes (lock_index.py), folders of empty wheel files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lock_index import StandIn, quiet, settings_for

from envforge.errors import DataError
from envforge.lock import (
    AS_TORCH,
    Build,
    Pages,
    PipSettings,
    allowed_torch,
    find_builds,
    from_json,
    probe_availability,
)
from envforge.lock.availability import default_variants

DEFAULTS = {"2.6": "cu124", "2.13": "cu130"}
X86 = "manylinux_2_28_x86_64"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


@pytest.fixture
def index() -> StandIn:
    with StandIn() as stand_in:
        for python in ("310", "311"):
            stand_in.add("simple", "torch", "2.6.0", tag=f"cp{python}-cp{python}-{X86}")
            stand_in.add("simple", "torchaudio", "2.6.0", tag=f"cp{python}-cp{python}-{X86}")
            stand_in.add("whl/cu126", "torch", "2.6.0+cu126", tag=f"cp{python}-cp{python}-linux_x86_64")
        stand_in.add("simple", "torch", "2.6.0", tag="cp312-cp312-win_amd64")
        stand_in.add("simple", "torch", "2.6.0", tag="cp313-cp313t-manylinux_2_28_x86_64")
        stand_in.add("simple", "torch", "2.6.0", tag="cp311-cp311-manylinux_2_28_aarch64")
        stand_in.add("simple", "torch", "2.7.0rc1", tag=f"cp311-cp311-{X86}")
        stand_in.add("whl/cu126", "torchvision", "0.21.0+cu126", tag=f"cp311-cp311-{X86}")
        stand_in.add("whl/cu126", "xformers", "0.0.29.post1", tag=f"cp39-abi3-{X86}")
        yield stand_in


def test_record_of_both_indexes(index: StandIn) -> None:
    got = probe_availability("cu126", settings_for(index), defaults=DEFAULTS)
    assert got.warnings == ()
    assert got.builds == (
        Build("torch", "2.6.0", "cu124", ("3.10", "3.11"), "default"),
        Build("torch", "2.6.0", "cu126", ("3.10", "3.11"), "torch", True),
        Build("torchaudio", "2.6.0", AS_TORCH, ("3.10", "3.11"), "default"),
        Build("torchvision", "0.21.0", "cu126", ("3.11",), "torch", True),
        Build("xformers", "0.0.29.post1", "", (), "torch"),
    )
    assert [(place.where, place.answers) for place in got.places] == [("default", True), ("torch", True)]
    assert {build.package for build in allowed_torch(got)} == {"torch", "torchaudio", "torchvision"}


def test_the_other_architecture(index: StandIn) -> None:
    got = probe_availability("cu126", settings_for(index), arch="aarch64", defaults={"2.6": "cpu"})
    assert got.builds == (Build("torch", "2.6.0", "cpu", ("3.11",), "default"),)


def test_a_companion_without_a_label_goes_with_its_indexs_torch_only(index: StandIn) -> None:
    got = probe_availability("cu126", settings_for(index), defaults=DEFAULTS)
    assert find_builds(got, "torchaudio", "2.6.0", "cu124", "3.11", torch="2.6.0")
    assert not find_builds(got, "torchaudio", "2.6.0", "cu126", "3.11", torch="2.6.0")
    assert not find_builds(got, "torchaudio", "2.6.0", "cpu", "3.11", torch="2.6.0")
    assert not find_builds(got, "torchaudio", "2.6.0", "cu124", "3.12", torch="2.6.0")


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("500", "HTTP 500"),
        ("401", "HTTP 401"),
        ("hang", "no answer within 0.5 s"),
        ("truncate", "not an index page"),
        ("garbage", "not an index page"),
    ],
)
def test_an_index_that_does_not_answer_is_recorded_and_told(index: StandIn, how: str, problem: str) -> None:
    index.misbehave = {"/whl/": how}
    got = probe_availability("cu126", settings_for(index), defaults=DEFAULTS, timeout=0.5)
    place = got.place("torch")
    assert place is not None
    assert not place.answers
    assert problem in place.problem
    assert len(got.warnings) == 1
    assert place.url in got.warnings[0]
    assert problem in got.warnings[0]
    assert [build.where for build in got.builds if build.package == "torch"] == ["default"]


def test_a_variant_without_an_index_is_an_answer(index: StandIn) -> None:
    got = probe_availability("cu999", settings_for(index), defaults=DEFAULTS)
    assert got.warnings == ()
    assert [build.where for build in got.builds] == ["default", "default"]


def test_folders(tmp_path: Path) -> None:
    links, house = tmp_path / "links", tmp_path / "house"
    for folder in (links, house):
        folder.mkdir()
    (links / f"torch-2.13.0+cpu-cp311-cp311-{X86}.whl").touch()
    (links / f"torch-2.13.0-cp312-cp312-{X86}.whl").touch()  # which CUDA it has, its name does not say
    (links / "torch-broken.whl").touch()
    (links / "numpy-2.0.0-py3-none-any.whl").touch()
    (house / f"torch-2.6.0+cu126-cp311-cp311-{X86}.whl").touch()
    settings = PipSettings(no_index=True, find_links=(str(links), str(tmp_path / "missing")))
    got = probe_availability("cpu", settings, wheelhouse=house, defaults=DEFAULTS)
    assert got.places == ()
    assert got.builds == (
        Build("torch", "2.13.0", "cpu", ("3.11",), "find-links", True),
        Build("torch", "2.6.0", "cu126", ("3.11",), "wheelhouse", True),
    )


def test_a_wheelhouse_that_is_no_folder_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a folder"):
        probe_availability("cpu", PipSettings(no_index=True), wheelhouse=tmp_path / "none", defaults=DEFAULTS)


def test_an_index_that_is_a_folder(tmp_path: Path, index: StandIn) -> None:
    page = tmp_path / "simple" / "torch"
    page.mkdir(parents=True)
    link = f"torch-2.13.0%2Bcpu-cp311-cp311-{X86}.whl"
    (page / "index.html").write_text(f'<a href="../../{link}#sha256=00">x</a>', encoding="utf-8")
    settings = settings_for(index, extra_index_urls=((tmp_path / "simple").as_uri(),))
    got = probe_availability("cpu", settings, defaults=DEFAULTS)
    assert Build("torch", "2.13.0", "cpu", ("3.11",), "extra-1", True) in got.builds


def test_a_find_links_page(index: StandIn) -> None:
    index.add("pages", "torch", "2.13.0+cpu", tag=f"cp311-cp311-{X86}")
    settings = settings_for(index, find_links=(f"{index.url}/pages/torch/",))
    got = probe_availability("cpu", settings, defaults=DEFAULTS)
    assert Build("torch", "2.13.0", "cpu", ("3.11",), "find-links", True) in got.builds


def test_disk_goes_before_indexes(index: StandIn, tmp_path: Path) -> None:
    (tmp_path / f"torch-2.6.0+cu126-cp311-cp311-{X86}.whl").touch()
    settings = settings_for(index, find_links=(str(tmp_path),))
    got = probe_availability("cu126", settings, defaults=DEFAULTS)
    where = [build.where for build in find_builds(got, "torch", "2.6.0", "cu126", "3.11", torch="2.6.0")]
    assert where == ["find-links", "torch"]


def test_json_round_trip(index: StandIn) -> None:
    got = probe_availability("cu126", settings_for(index), defaults=DEFAULTS)
    assert from_json(json.loads(json.dumps(got.to_json()))) == got
    with pytest.raises(DataError):
        from_json({"schema": 2})


def test_the_record_holds_no_credentials(index: StandIn) -> None:
    url = index.url.replace("//", "//anna:pw@")
    got = probe_availability(
        "cu126", settings_for(index, index_url=f"{url}/simple", torch_index=f"{url}/whl"), defaults=DEFAULTS
    )
    assert got.builds
    assert "anna" not in json.dumps(got.to_json())
    assert any(header for header in index.authorization)


def test_defaults_are_the_matrixs() -> None:
    got = default_variants("x86_64")
    assert (got["2.6"], got["2.1"], got["2.13"]) == ("cu124", "cu121", "cu130")


def test_pages_come_in_the_background_and_hold_up_nobody(index: StandIn) -> None:
    index.misbehave = {"/simple/": "hang"}
    program = (
        "import sys, time; from envforge.lock import Pages, PipSettings\n"
        "begun = time.monotonic()\n"
        "pages = Pages(PipSettings(index_url=sys.argv[1]), timeout=30.0)\n"
        "time.sleep(0.3); assert time.monotonic() - begun < 5\n"
    )
    subprocess.run([sys.executable, "-c", program, f"{index.url}/simple"], check=True, timeout=15)
    assert any("/simple/torch/" in line for line in index.log), "asked before anybody waited for it"


def test_pages_are_asked_for_once(index: StandIn) -> None:
    settings = settings_for(index)
    pages = Pages(settings)
    one = probe_availability("cu126", settings, defaults=DEFAULTS, pages=pages)
    assert one == probe_availability("cu126", settings, defaults=DEFAULTS)
    asked = [line for line in index.log if "/simple/torch/" in line]
    probe_availability("cu124", settings, defaults=DEFAULTS, pages=pages)
    assert [line for line in index.log if "/simple/torch/" in line] == asked
