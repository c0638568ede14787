"""Plan -> lock with the real uv against a stand-in index (lock_index.py says what is fake)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lock_index import StandIn, build_wheel, make_plan, quiet, settings_for

from envforge.errors import ConflictError, IndexUnreachableError, OutsideError
from envforge.lock import (
    Lock,
    LockConflict,
    install_command,
    make_lock,
    probe_availability,
    read_requirements,
    write_lock,
)
from envforge.lock.formats import canonical, lock_hash
from envforge.lock.settings import PipSettings
from envforge.resolver.plan import Plan

DEFAULTS = {"2.6": "cu124"}
LINUX = "cp311-cp311-manylinux_2_28_x86_64"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quiet(monkeypatch, tmp_path)


@pytest.fixture
def index() -> StandIn:
    """Default index with torch 2.6.0 (cu124) and friends; PyTorch index with the cu126 build and a numpy."""
    with StandIn() as stand_in:
        add = stand_in.add
        add("simple", "numpy", "1.26.4", uploaded="2024-02-06T00:00:00Z")
        add("simple", "numpy", "2.2.0", uploaded="2024-12-08T00:00:00Z")
        add("simple", "torch", "2.6.0", "numpy", tag=LINUX, uploaded="2025-01-29T00:00:00Z")
        add("simple", "peft", "0.13.2", "torch>=1.13", "numpy", uploaded="2024-10-11T00:00:00Z")
        add("simple", "accelerate", "0.20.0", "numpy", uploaded="2023-06-08T00:00:00Z")
        add("simple", "accelerate", "1.0.0", "numpy", uploaded="2024-10-07T00:00:00Z")
        add("simple", "transformers", "4.46.0", "numpy", "tokenizers", uploaded="2024-10-24T00:00:00Z")
        add("simple", "tokenizers", "0.20.1", uploaded="2024-10-10T00:00:00Z")
        add("simple", "tokenizers", "0.21.0", uploaded="2024-11-27T00:00:00Z")
        add("whl/cu126", "torch", "2.6.0+cu126", "numpy", tag=LINUX)
        add("whl/cu126", "torchvision", "0.21.0+cu126", "torch==2.6.0", tag=LINUX)
        add("whl/cu126", "numpy", "2.2.0")
        add("whl/cu126", "numpy", "9.9")
        yield stand_in


def lock(plan: Plan, settings: PipSettings, **options: object) -> Lock:
    availability = probe_availability(plan.variant, settings, defaults=DEFAULTS, wheelhouse=options.get("wheelhouse"))  # type: ignore[arg-type]
    return make_lock(plan, availability, settings, **options)  # type: ignore[arg-type]


def versions(made: Lock) -> dict[str, str]:
    return {package.name: package.version for package in made.packages}


def test_torch_comes_from_its_own_index_and_nothing_else_does(index: StandIn) -> None:
    made = lock(make_plan({"torch": "2.6.0", "torchvision": "0.21.0", "peft": "0.13.2"}), settings_for(index))
    assert versions(made) == {
        "numpy": "2.2.0",
        "peft": "0.13.2",
        "torch": "2.6.0+cu126",
        "torchvision": "0.21.0+cu126",
    }
    assert made.index_kinds == {"torch": "torch", "torchvision": "torch"}
    assert f"--extra-index-url {index.url}/whl/cu126\n" in made.requirements
    assert "torch==2.6.0+cu126 \\\n    --hash=sha256:" in made.requirements
    # numpy 2.2.0 is on both indexes with different bytes: the lock has the default index's
    wanted = next(file for file in index.files["simple"]["numpy"] if "2.2.0" in file.name)
    assert made.package("numpy").hashes == (f"sha256:{wanted.sha256}",)  # type: ignore[union-attr]
    assert not [line for line in index.log if "/whl/cu126/numpy" in line]


def test_the_default_variant_needs_no_torch_index(index: StandIn) -> None:
    index.misbehave = {"/whl/": "500"}
    made = lock(make_plan({"torch": "2.6.0", "peft": "0.13.2"}, "cu124"), settings_for(index))
    assert versions(made)["torch"] == "2.6.0"
    assert made.torch_index is None
    assert "index-url" not in made.requirements


def test_another_build_on_disk_does_not_take_the_place_of_the_default_variant(index: StandIn, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    name, data = build_wheel("torch", "2.6.0+cpu", ("numpy",), tag=LINUX)
    (links / name).write_bytes(data)
    settings = settings_for(index, find_links=(str(links),))
    assert versions(lock(make_plan({"torch": "2.6.0"}, "cu124"), settings))["torch"] == "2.6.0"
    made = lock(make_plan({"torch": "2.6.0"}, "cpu"), settings)
    assert versions(made)["torch"] == "2.6.0+cpu"
    assert made.index_kinds == {"torch": "find-links"}
    assert made.package("torch").size == len(data)  # type: ignore[union-attr]


def test_a_wheelhouse_alone_is_enough(index: StandIn, tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    for name, version, *needs in (("torch", "2.6.0+cu126", "numpy"), ("numpy", "2.2.0")):
        file, data = build_wheel(name, version, tuple(needs))
        (house / file).write_bytes(data)
    settings = PipSettings(no_index=True)
    made = lock(make_plan({"torch": "2.6.0"}, as_of="2020-01-01"), settings, wheelhouse=house)
    assert versions(made) == {"numpy": "2.2.0", "torch": "2.6.0+cu126"}
    assert set(made.index_kinds.values()) == {"find-links"}


def test_the_date_cuts_off_what_the_plan_leaves_open(index: StandIn) -> None:
    pins = {"torch": "2.6.0", "transformers": "4.46.0"}
    made = lock(make_plan(pins, "cu124", as_of="2024-11-23", undated=("torch",)), settings_for(index))
    assert versions(made) == {"numpy": "1.26.4", "tokenizers": "0.20.1", "torch": "2.6.0", "transformers": "4.46.0"}
    assert made.exempted == ()


def test_under_a_date_the_torch_index_stays_usable(index: StandIn) -> None:
    plan = make_plan({"torch": "2.6.0", "torchvision": "0.21.0"}, as_of="2024-11-23")
    made = lock(plan, settings_for(index))
    assert versions(made) == {"numpy": "1.26.4", "torch": "2.6.0+cu126", "torchvision": "0.21.0+cu126"}
    assert made.exempted == ()


def test_what_does_not_solve_under_the_date_is_let_past_it_and_told(index: StandIn) -> None:
    index.add("simple", "trl", "0.12.0", "tokenizers>=0.21", uploaded="2024-11-01T00:00:00Z")
    pins = {"transformers": "4.46.0", "trl": "0.12.0"}
    made = lock(make_plan(pins, "cu124", as_of="2024-11-23"), settings_for(index))
    assert versions(made) == {"numpy": "1.26.4", "tokenizers": "0.21.0", "transformers": "4.46.0", "trl": "0.12.0"}
    assert made.exempted == ("tokenizers",)


def test_an_index_without_upload_times_is_locked_without_the_date(index: StandIn) -> None:
    names = [f"leaf{number}" for number in range(10)]
    for name in names:
        index.add("simple", name, "1", uploaded=None)
    index.add("simple", "trunk", "1", *names, uploaded=None)
    made = lock(make_plan({"trunk": "1"}, "cu124", as_of="2024-11-23"), settings_for(index))
    assert len(made.packages) == 11
    assert made.exempted == ()
    assert "without a date" in made.warnings[0]


def test_constraints_of_the_plan_and_of_pip_count(index: StandIn, tmp_path: Path) -> None:
    plan = make_plan({"transformers": "4.46.0"}, "cu124", constraints=("numpy<2",))
    capped = tmp_path / "constraints.txt"
    capped.write_text("tokenizers<0.21\n", encoding="utf-8")
    assert versions(lock(plan, settings_for(index, constraints=(str(capped),)))) == {
        "numpy": "1.26.4",
        "tokenizers": "0.20.1",
        "transformers": "4.46.0",
    }


@pytest.mark.parametrize("turned_off", ["UV_NO_CONFIG", "UV_CONFIG_FILE", None])
def test_a_source_archive_is_locked_without_running_it(
    index: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, turned_off: str | None
) -> None:
    """Its metadata is the matrix's. Also where the user's environment makes uv pass over [tool.uv]."""
    from envforge.matrix.releases import Release

    if turned_off:
        (tmp_path / "uv.toml").write_text("", encoding="utf-8")
        monkeypatch.setenv(turned_off, "1" if turned_off == "UV_NO_CONFIG" else str(tmp_path / "uv.toml"))
    release = Release("2.7.0", "2024-11-01", ">=3.9", ("numpy", "einops"), (), True, False, 0)
    monkeypatch.setattr("envforge.matrix.releases.load_releases", lambda name: (release,))
    marker = tmp_path / "ran"
    index.add_source("simple", "flash-attn", "2.7.0", f"open({str(marker)!r}, 'w')\n")
    index.add("simple", "einops", "0.8.0")
    made = lock(make_plan({"flash-attn": "2.7.0"}, "cu124", source_only=("flash-attn",)), settings_for(index))
    assert versions(made) == {"einops": "0.8.0", "flash-attn": "2.7.0", "numpy": "2.2.0"}
    assert made.package("flash-attn").kind == "source"  # type: ignore[union-attr]
    assert not marker.exists()
    assert [package.name for package in read_requirements(made.requirements) if package.kind == "source"] == [
        "flash-attn"
    ]


def test_a_ready_wheel_of_a_source_package_is_taken(index: StandIn, tmp_path: Path) -> None:
    index.add_source("simple", "flash-attn", "2.7.0", "raise SystemExit(1)\n")
    name, data = build_wheel("flash-attn", "2.7.0+cu12torch2.6", ("numpy",))
    (tmp_path / name).write_bytes(data)
    plan = make_plan({"flash-attn": "2.7.0"}, "cu124", source_only=("flash-attn",))
    made = lock(plan, settings_for(index), wheelhouse=tmp_path)
    assert versions(made) == {"flash-attn": "2.7.0+cu12torch2.6", "numpy": "2.2.0"}


def test_releases_that_this_python_may_not_use_are_ruled_out(index: StandIn) -> None:
    """uv ignores upper bounds of Requires-Python."""
    index.add("simple", "leaf", "2", python=">=3.8,<3.11")
    index.add("simple", "leaf", "1", python=">=3.8")
    index.add("simple", "tree", "1", "leaf")
    made = lock(make_plan({"tree": "1"}, "cu124"), settings_for(index))
    assert versions(made) == {"leaf": "1", "tree": "1"}
    assert made.excluded == ("leaf!=2",)


def test_bounds_are_read_from_the_page_where_there_is_no_metadata_file(index: StandIn) -> None:
    for version, bound in (("2", ">=3.8,<3.11"), ("1", ">=3.8")):
        index.add("simple", "leaf", version, python=bound).metadata = None
    index.add("simple", "tree", "1", "leaf").metadata = None
    assert versions(lock(make_plan({"tree": "1"}, "cu124"), settings_for(index))) == {"leaf": "1", "tree": "1"}


def test_a_bound_on_a_patch_release_is_no_reason() -> None:
    from packaging.specifiers import SpecifierSet

    from envforge.lock.pythons import _allows

    assert _allows(SpecifierSet(">=3.10,!=3.11.1"), "3.11")
    assert _allows(SpecifierSet(">=3.11.4"), "3.11")
    assert not _allows(SpecifierSet("<3.11"), "3.11")
    assert not _allows(SpecifierSet(">=3.12"), "3.11")


def test_conflict_names_the_smallest_set_of_pins(index: StandIn) -> None:
    index.add("simple", "sentence", "1", "accelerate>=0.21")
    pins = {"torch": "2.6.0", "peft": "0.13.2", "accelerate": "0.20.0", "sentence": "1", "transformers": "4.46.0"}
    with pytest.raises(LockConflict) as caught:
        lock(make_plan(pins, "cu124"), settings_for(index))
    assert caught.value.pins == {"accelerate": "0.20.0", "sentence": "1"}
    assert (caught.value.python, caught.value.variant, caught.value.exit_code) == ("3.11", "cu124", 1)
    assert "accelerate>=0.21" in caught.value.words
    assert "the-plan" not in caught.value.cause


def test_conflict_through_packages_in_between(index: StandIn) -> None:
    """Neither pin names the other: both come down on `leaf`."""
    index.add("simple", "leaf", "1")
    index.add("simple", "leaf", "2")
    index.add("simple", "middle", "1", "leaf<2")
    index.add("simple", "left", "1", "middle")
    index.add("simple", "right", "1", "leaf>=2")
    pins = {"left": "1", "right": "1", "peft": "0.13.2", "torch": "2.6.0"}
    with pytest.raises(LockConflict) as caught:
        lock(make_plan(pins, "cu124"), settings_for(index))
    assert caught.value.pins == {"left": "1", "right": "1"}


def test_a_conflict_does_not_depend_on_the_date(index: StandIn) -> None:
    index.add("simple", "sentence", "1", "accelerate>=0.21")
    plan = make_plan({"accelerate": "0.20.0", "sentence": "1"}, "cu124", as_of="2024-11-23")
    with pytest.raises(LockConflict) as caught:
        lock(plan, settings_for(index))
    assert caught.value.pins == {"accelerate": "0.20.0", "sentence": "1"}


def test_a_pin_that_is_not_on_the_index_is_learned_alone(index: StandIn) -> None:
    with pytest.raises(LockConflict) as caught:
        lock(make_plan({"peft": "0.99.0", "torch": "2.6.0"}, "cu124"), settings_for(index))
    assert caught.value.pins == {"peft": "0.99.0"}


def test_without_a_pin_to_blame_it_is_a_plain_no(index: StandIn) -> None:
    plan = make_plan({"peft": "0.13.2", "torch": "2.6.0"}, "cu124", requests=("peft", "not-there-at-all"))
    with pytest.raises(ConflictError) as caught:
        lock(plan, settings_for(index))
    assert not isinstance(caught.value, LockConflict)
    assert "not-there-at-all was not found" in caught.value.cause


def test_shrinking_is_bounded(index: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve pins that only together contradict: the calls stay within the bound, and the set still conflicts."""
    import envforge.lock.make as make_module

    pins = {}
    for number in range(12):
        index.add("simple", f"part{number}", "1", f"leaf!={number}")
        pins[f"part{number}"] = "1"
    for number in range(12):
        index.add("simple", "leaf", str(number))
    index.add("simple", "root", "1", "leaf")
    calls = []
    real = make_module.run_uv
    monkeypatch.setattr(make_module, "run_uv", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    with pytest.raises(LockConflict) as caught:
        lock(make_plan({**pins, "root": "1", "peft": "0.13.2"}, "cu124"), settings_for(index))
    assert len(calls) <= 1 + make_module.MAX_SHRINK
    assert set(caught.value.pins) == {*pins} | ({"root"} & set(caught.value.pins))


def test_requests_outside_the_matrix_join_with_extras_and_markers(index: StandIn) -> None:
    index.add("simple", "tool", "1", "numpy<2 ; extra == 'old'")
    index.add("simple", "never", "1")
    plan = make_plan(
        {"peft": "0.13.2", "torch": "2.6.0"},
        "cu124",
        requests=("peft>=0.13", "tool[old]>=1", "never; sys_platform == 'win32'"),
    )
    made = lock(plan, settings_for(index))
    assert versions(made) == {"numpy": "1.26.4", "peft": "0.13.2", "tool": "1", "torch": "2.6.0"}


def test_extras_of_pins(index: StandIn) -> None:
    index.add("simple", "framework", "1", "tokenizers<0.21 ; extra == 'fast'")
    made = lock(make_plan({"framework": "1"}, "cu124", extras={"framework": ("fast",)}), settings_for(index))
    assert versions(made) == {"framework": "1", "tokenizers": "0.20.1"}


def test_torch_index_out_of_reach_is_said_before_uv_is_asked(index: StandIn) -> None:
    index.misbehave = {"/whl/": "503"}
    settings = settings_for(index)
    availability = probe_availability("cu126", settings, defaults=DEFAULTS)
    assert "does not answer (HTTP 503)" in availability.warnings[0]
    with pytest.raises(IndexUnreachableError) as caught:
        make_lock(make_plan({"torch": "2.6.0"}), availability, settings)
    assert f"{index.url}/whl/cu126" in caught.value.cause
    assert caught.value.exit_code == 3


def test_a_build_that_no_place_has_is_not_a_network_fault(index: StandIn) -> None:
    with pytest.raises(OutsideError) as caught:
        lock(make_plan({"torch": "2.6.0"}, python="3.13"), settings_for(index))
    assert caught.value.id == "no-build"
    assert "2.6.0 for cu126 (Python 3.11, torch)" in caught.value.cause


def test_guests_come_from_the_torch_index_only_where_it_has_them(index: StandIn) -> None:
    index.add("whl/cu126", "torchao", "0.8.0+cu126")
    index.add("simple", "torchao", "0.8.0")
    index.add("simple", "xformers", "0.0.29")
    made = lock(make_plan({"torch": "2.6.0", "torchao": "0.8.0", "xformers": "0.0.29"}), settings_for(index))
    assert versions(made)["torchao"] == "0.8.0+cu126"
    assert made.index_kinds == {"torch": "torch", "torchao": "torch"}


def test_equal_plans_give_equal_bytes(index: StandIn) -> None:
    plan = make_plan({"torch": "2.6.0", "peft": "0.13.2"})
    first, second = lock(plan, settings_for(index)), lock(plan, settings_for(index))
    assert (first.requirements, first.pylock, first.hash) == (second.requirements, second.pylock, second.hash)
    assert first.hash == lock_hash(read_requirements(first.requirements))
    assert canonical(first.packages).startswith("numpy==2.2.0 sha256:")


def test_the_two_files_name_the_same_packages(index: StandIn, tmp_path: Path) -> None:
    from envforge.lock.formats import tomllib

    made = lock(make_plan({"torch": "2.6.0", "peft": "0.13.2"}), settings_for(index))
    requirements, pylock = write_lock(made, tmp_path / "out")
    rows = tomllib.loads(pylock.read_text(encoding="utf-8"))
    listed = {(row["name"], row["version"], row["wheels"][0]["hashes"]["sha256"]) for row in rows["packages"]}
    lines = read_requirements(requirements.read_text(encoding="utf-8"))
    assert listed == {(row.name, row.version, row.hashes[0].removeprefix("sha256:")) for row in lines}
    assert rows["tool"]["envforge"]["lock"] == made.hash
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["pylock.toml", "requirements.txt"]


def test_credentials_reach_the_index_and_nothing_else(index: StandIn, tmp_path: Path) -> None:
    index.password = "tops3cret"
    secret = {
        "index_url": f"{index.url}/simple".replace("//", "//anna:tops3cret@"),
        "torch_index": f"{index.url}/whl".replace("//", "//anna:tops3cret@"),
    }
    settings = settings_for(index, **secret)
    made = lock(make_plan({"torch": "2.6.0", "peft": "0.13.2"}), settings)
    write_lock(made, tmp_path)
    argv, env = install_command(tmp_path, settings, python=sys.executable)
    texts = [made.requirements, made.pylock, repr(made), repr(settings), " ".join(argv)]
    assert not [text for text in texts if "tops3cret" in text or "anna" in text]
    assert env["UV_INDEX_PIP_PASSWORD"] == "tops3cret"


def test_the_lock_installs_into_an_environment(index: StandIn, tmp_path: Path) -> None:
    """torch and numpy from their own indexes, though the PyTorch index has a numpy 2.2.0 with other bytes too."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    tag = "py3-none-any"
    index.files["whl/cu126"]["torch"].clear()
    index.add("whl/cu126", "torch", "2.6.0+cu126", "numpy", tag=tag)
    settings = settings_for(index)
    made = lock(make_plan({"torch": "2.6.0", "peft": "0.13.2"}, python=python), settings)
    write_lock(made, tmp_path / "lock")
    argv, env = install_command(tmp_path / "lock", settings, python=sys.executable, target=tmp_path / "site")
    done = subprocess.run(argv, env=env, cwd=tmp_path / "lock", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code = "import torch, numpy, peft; print(torch.VERSION, numpy.VERSION, peft.VERSION, numpy.__file__)"
    told = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True
    )
    assert told.stdout.split()[:3] == ["2.6.0+cu126", "2.2.0", "0.13.2"]
    assert str(tmp_path) in told.stdout


def test_a_companion_that_only_the_closure_brings_in_fits_the_variant_too(index: StandIn) -> None:
    index.add("simple", "timm", "1", "torchvision")
    index.add("simple", "torchvision", "0.21.0", "torch==2.6.0", tag=LINUX)
    index.add("simple", "torchvision", "0.20.0", "torch==2.5.0", tag=LINUX)
    plan = make_plan({"torch": "2.6.0"}, requests=("torch", "timm"))
    made = lock(plan, settings_for(index))
    assert versions(made)["torchvision"] == "0.21.0+cu126"
    assert made.index_kinds == {"torch": "torch", "torchvision": "torch"}
    made = lock(make_plan({"torch": "2.6.0"}, "cu124", requests=("torch", "timm")), settings_for(index))
    assert versions(made)["torchvision"] == "0.21.0"


def test_a_companion_without_a_fitting_build_is_left_out_and_told(index: StandIn, tmp_path: Path) -> None:
    """The default index's torchvision holds CUDA code that a CPU torch cannot load: seen to fail at import."""
    name, data = build_wheel("torch", "2.6.0+cpu", ("numpy",), tag=LINUX)
    (tmp_path / name).write_bytes(data)
    index.add("simple", "timm", "1", "torchvision")
    index.add("simple", "torchvision", "0.21.0", "torch==2.6.0", "pillow", tag=LINUX)
    index.add("simple", "pillow", "11")
    settings = settings_for(index, find_links=(str(tmp_path),))
    made = lock(make_plan({"torch": "2.6.0"}, "cpu", requests=("torch", "timm")), settings)
    assert versions(made) == {"numpy": "2.2.0", "timm": "1", "torch": "2.6.0+cpu"}
    assert made.left_out == ("torchvision",)
    assert "torchvision is left out: no build of it for cpu" in made.warnings[0]


def test_what_the_plan_leaves_out_stays_out(index: StandIn) -> None:
    plan = make_plan({"peft": "0.13.2", "torch": "2.6.0"}, "cu124", left_out=("numpy",))
    assert versions(lock(plan, settings_for(index))) == {"peft": "0.13.2", "torch": "2.6.0"}


def test_torch_that_the_plan_does_not_know_is_not_locked_by_accident(index: StandIn) -> None:
    index.add("simple", "lightning", "1", "torch")
    with pytest.raises(ConflictError, match="the plan has no torch"):
        lock(make_plan({"transformers": "4.46.0"}, "cpu", requests=("lightning",)), settings_for(index))


def test_torch_from_a_folder_and_its_companion_from_the_torch_index(index: StandIn, tmp_path: Path) -> None:
    name, data = build_wheel("torch", "2.6.0+cu126", ("numpy",), tag=LINUX)
    (tmp_path / name).write_bytes(data)
    index.add("simple", "timm", "1", "torchvision", uploaded="2024-01-01T00:00:00Z")
    index.add("simple", "torchvision", "0.21.0", "torch==2.6.0", tag=LINUX, uploaded="2024-01-01T00:00:00Z")
    settings = settings_for(index, find_links=(str(tmp_path),))
    plan = make_plan({"torch": "2.6.0"}, requests=("torch", "timm"), as_of="2024-11-23")
    made = lock(plan, settings)
    assert made.index_kinds == {"torch": "find-links", "torchvision": "torch"}
    assert f"--extra-index-url {index.url}/whl/cu126\n" in made.requirements


def test_pips_own_constraints_are_named_when_they_are_to_blame(index: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("peft<0.13\nunrelated<9\n", encoding="utf-8")
    with pytest.raises(LockConflict) as caught:
        lock(make_plan({"peft": "0.13.2", "torch": "2.6.0"}, "cu124"), settings_for(index, constraints=(str(file),)))
    assert caught.value.pins == {"peft": "0.13.2"}
    assert "peft<0.13" in caught.value.hint
    assert "unrelated" not in caught.value.hint


def test_a_mirror_of_the_torch_index_with_a_login_of_its_own(index: StandIn, tmp_path: Path) -> None:
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with StandIn(password="tops3cret") as mirror:
        mirror.add("whl/cu126", "torch", "2.6.0+cu126", "numpy")
        settings = settings_for(index, torch_index=f"{mirror.url}/whl".replace("//", "//anna:tops3cret@"))
        made = lock(make_plan({"torch": "2.6.0"}, python=python), settings)
        assert made.index_kinds == {"torch": "torch"}
        write_lock(made, tmp_path)
        argv, env = install_command(tmp_path, settings, python=sys.executable, target=tmp_path / "site")
        assert "tops3cret" not in " ".join(argv) + made.requirements + made.pylock
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_no_interpreter_is_looked_for_where_nothing_is_built(
    index: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    for name in ("python", "python3", "python3.10"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho $0 >> {told}\nexit 127\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    made = lock(make_plan({"numpy": "2.2.0"}, python="3.10"), settings_for(index))
    assert versions(made) == {"numpy": "2.2.0"}
    assert not told.exists(), told.read_text()
