"""Harvesting release metadata from a small index of our own over real HTTP; one test asks the configured index."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harvest_index import FakeIndex, metadata, sdist, serve, wheel

from envforge.errors import EnvforgeError, IndexUnreachableError, UsageError
from envforge.harvest import (
    PACKAGES,
    HarvestRefusedError,
    Index,
    cuda_libraries,
    harvest,
    news,
    transformers_floors,
    wheel_files,
    write,
)
from envforge.harvest.choose import keep, linux_tag
from envforge.harvest.read import from_requirements, from_requires_txt
from envforge.lock.settings import PipSettings, read_pip_settings
from envforge.matrix.releases import RELEASES, Release, load_releases

DAY = "2026-11-30"


@pytest.fixture
def index() -> Iterator[FakeIndex]:
    with serve(FakeIndex()) as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "releases").mkdir()
    return tmp_path / "releases"


def client(fake: FakeIndex, **options: Any) -> Index:
    return Index(PipSettings(index_url=fake.url), **{"attempts": 2, "wait_s": 0.01, "deadline_s": 60.0, **options})


def run(fake: FakeIndex, name: str, folder: Path, **options: Any) -> dict[str, Release]:
    """Harvests, writes, and returns the rows as they load."""
    with client(fake) as own:
        write(harvest(name, own, folder=folder, cache=folder.parent / "cache", **options), DAY, folder)
    return {release.version: release for release in load_releases(name, folder)}


def refused(fake: FakeIndex, name: str, folder: Path, **options: Any) -> EnvforgeError:
    """Harvests, must fail, and must leave the folder exactly as it was."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with client(fake, **options) as own, pytest.raises(EnvforgeError) as caught:
        write(harvest(name, own, folder=folder, cache=folder.parent / "cache2"), DAY, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    return caught.value


def fill(fake: FakeIndex, name: str, count: int) -> list[str]:
    """`count` small releases 1.0 ... of one package; returns their versions."""
    versions = [f"1.{i}" for i in range(count)]
    for version in versions:
        fake.release(name, version, "2024-05-01", ["numpy>=1.17"])
    return versions


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_fresh_harvest(index: FakeIndex, folder: Path) -> None:
    index.release("peft", "0.0.1", "2022-01-19", ["torch"])  # before the window, and not the last before it
    index.release("peft", "0.1.0", "2022-10-10", ["torch"])  # current when the window opens
    index.release("peft", "0.2.0", "2023-03-01", ["numpy (>=1.17)", "torch (>=1.13.0)", 'black ; extra == "quality"'])
    index.release("peft", "0.10.0", "2024-03-21", ["torch>=1.13.0", "numpy>=1.17"], python=">=3.8.0")
    index.release("peft", "0.11.0rc1", "2024-05-01", ["torch>=1.13.0"])
    index.release("peft", "0.11.0.dev3", "2024-05-02", ["torch>=1.13.0"])
    index.release("peft", "0.11.1", "2024-05-17", ["torch>=1.13.0"], yanked="broken")
    index.add("peft", "peft-0.10.0.tar.gz", b"", "2024-03-22")
    index.add("peft", "peft-0.12.0-cp311-cp311-win_amd64.whl", b"", "2024-07-01")
    rows = run(index, "peft", folder)
    assert list(rows) == ["0.1.0", "0.2.0", "0.10.0", "0.11.0rc1", "0.11.1"]
    row = rows["0.10.0"]
    assert (row.uploaded, row.python, row.sdist, row.yanked) == ("2024-03-21", ">=3.8.0", True, False)
    assert set(row.requires) == {"numpy>=1.17", "torch>=1.13.0"} == set(rows["0.2.0"].requires)
    assert row.wheels == ("py3-none-any",)
    assert row.size == len(index.bodies["/files/peft-0.10.0-py3-none-any.whl"])
    assert rows["0.11.1"].yanked and rows["0.11.0rc1"].requires_from == "wheel"
    assert not any(path.endswith(".whl") for path in index.asked), "the METADATA lies beside the wheels"


def test_floor_keeps_old_releases(index: FakeIndex, folder: Path) -> None:
    for version, day in (("1.12.1", "2022-08-05"), ("1.13.0", "2022-10-20"), ("1.13.1", "2022-10-28")):
        filename = f"torch-{version}-cp311-cp311-manylinux1_x86_64.whl"
        requires = ["typing-extensions", "nvidia-cublas-cu11 (==11.10.3.66)", 'cuda-bindings; sys_platform == "linux"']
        index.add("torch", filename, b"", day, beside=metadata("torch", version, requires))
    rows = run(index, "torch", folder)
    assert list(rows) == ["1.13.0", "1.13.1"]
    assert set(rows["1.13.1"].requires) == {"typing-extensions"}


def test_newest_python_on_x86_64_speaks_for_a_release(index: FakeIndex, folder: Path) -> None:
    for tag in (
        "cp39-cp39-manylinux_2_28_x86_64",
        "cp310-cp310-manylinux_2_28_x86_64",
        "cp313-cp313t-manylinux_2_28_x86_64",
        "cp314-cp314-manylinux_2_28_aarch64",
        "cp311-cp311-musllinux_1_2_x86_64",
        "pp310-pypy310_pp73-manylinux_2_28_x86_64",
    ):
        beside = metadata("triton", "3.0.0", [f"needs-{tag.split('-')[0]}"])
        index.add("triton", f"triton-3.0.0-{tag}.whl", tag.encode(), "2024-07-19", beside=beside)
    row = run(index, "triton", folder)["3.0.0"]
    assert row.requires == ("needs-cp310",)
    assert row.wheels == (
        "cp310-cp310-manylinux_2_28_x86_64",
        "cp314-cp314-manylinux_2_28_aarch64",
        "cp39-cp39-manylinux_2_28_x86_64",
    )
    assert row.size == len("cp310-cp310-manylinux_2_28_x86_64")


def test_a_partly_yanked_release_counts_by_its_other_files(index: FakeIndex, folder: Path) -> None:
    index.release("trl", "0.1.0", "2024-01-01", ["torch"])
    index.add("trl", "trl-0.1.0.tar.gz", b"", "2024-01-01", yanked=True)
    row = run(index, "trl", folder)["0.1.0"]
    assert (row.yanked, row.sdist) == (False, False)


@pytest.mark.parametrize(
    ("filename", "tag"),
    [
        (
            "a-1-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64",
        ),
        ("a-1-py2.py3-none-any.whl", "py3-none-any"),
        ("a-1-7-py3-none-linux_aarch64.whl", "py3-none-linux_aarch64"),
        ("a-1-cp311-cp311-macosx_11_0_arm64.whl", None),
        ("a-1-cp311-cp311-manylinux_2_17_s390x.whl", None),
        ("a-1-cp27-cp27mu-manylinux1_x86_64.whl", None),
        ("a-1-py2-none-any.whl", None),
    ],
)
def test_linux_tag(filename: str, tag: str | None) -> None:
    assert linux_tag(filename) == tag


def test_kept_lines() -> None:
    url = "https://files.example/whl/cu121/xformers-0.0.28.post1-cp310-cp310-manylinux_2_28_x86_64.whl"
    kept, unreadable = keep(
        "unsloth",
        [
            f'xformers @ {url} ; python_version=="3.10" and extra == "cu121"',
            'flash-attn @ git+https://example.org/flash.git ; extra == "flash"',
            "Torch>=2.4.0,!=2.5",
            'pytest ; extra == "dev"',
            'sphinx ; extra == "docs_specific"',
            'tqdm ; extra == "dev" or extra == "cli"',
            "nvidia-ml-py",
            "this is : no requirement",
        ],
    )
    assert kept == (
        "Torch!=2.5,>=2.4.0",
        'flash-attn; extra == "flash"',
        "nvidia-ml-py",
        'tqdm; extra == "dev" or extra == "cli"',
        'xformers==0.0.28.post1; python_version == "3.10" and extra == "cu121"',
    )
    assert unreadable == ("this is : no requirement",)


# --- where requirements come from ------------------------------------------------------------------------------------


def test_without_metadata_beside_it_the_wheel_is_read_in_part(index: FakeIndex, folder: Path) -> None:
    body = wheel("peft", "0.3.0", ["torch>=1.13.0"])
    index.add("peft", "peft-0.3.0-py3-none-any.whl", body, "2023-05-10")
    row = run(index, "peft", folder)["0.3.0"]
    assert (row.requires, row.requires_from) == (("torch>=1.13.0",), "wheel")
    assert index.sent["/files/peft-0.3.0-py3-none-any.whl"] < len(body) / 10


def test_without_ranges_the_index_json_is_asked(index: FakeIndex, folder: Path) -> None:
    index.ranges = False
    index.trickle = {"/files/.*"}  # read whole, they would take a day
    body = wheel("peft", "0.3.0", ["torch"])
    for version in ("0.2.0", "0.3.0", "0.4.0"):
        index.add("peft", f"peft-{version}-py3-none-any.whl", body, "2023-05-10")
    for version, requires in (("0.2.0", None), ("0.3.0", ["torch>=1.13.0"])):
        info = {"version": version, "requires_dist": requires}
        index.bodies[f"/pypi/peft/{version}/json"] = json.dumps({"info": info}).encode()
    rows = run(index, "peft", folder)
    assert (rows["0.3.0"].requires, rows["0.3.0"].requires_from) == (("torch>=1.13.0",), "index")
    assert (rows["0.2.0"].requires, rows["0.2.0"].requires_from) == ((), "unknown"), "null: the index read none"
    assert (rows["0.4.0"].requires, rows["0.4.0"].requires_from) == ((), "unknown"), "no such answer"


SETUP = "open('ran', 'w')\nraise SystemExit('code of the archive was run')\n"


BARE = metadata("d", "1", []).decode()
DECLARED = metadata("d", "1", ["torch>=2", 'mpi4py; extra == "mpi"']).decode()
BUILT = "torch\nhjson\n\n[sd]\ndiffusers\n"
LISTED = "# all\ntorch  # any\n-r other.txt\npydantic<2.0.0\n"


@pytest.mark.parametrize(
    ("members", "requires", "origin"),
    [
        ({"PKG-INFO": DECLARED}, {"torch>=2", 'mpi4py; extra == "mpi"'}, "sdist"),
        (
            {"PKG-INFO": BARE, "deepspeed.egg-info/requires.txt": BUILT},
            {"torch", "hjson", 'diffusers; extra == "sd"'},
            "sdist-requires-txt",
        ),
        (
            {"requirements/requirements.txt": LISTED, "x/requires.txt": "no"},
            {"torch", "pydantic<2.0.0"},
            "sdist-requirements",
        ),
        ({"PKG-INFO": BARE}, set(), "unknown"),
    ],
)
def test_source_archives(
    index: FakeIndex, folder: Path, members: dict[str, str], requires: set[str], origin: str
) -> None:
    index.add(
        "deepspeed",
        "deepspeed-0.12.3.tar.gz",
        sdist("deepspeed", "0.12.3", {"setup.py": SETUP, **members}),
        "2023-11-10",
    )
    row = run(index, "deepspeed", folder)["0.12.3"]
    assert (set(row.requires), row.requires_from, row.sdist, row.wheels) == (requires, origin, True, ())
    assert row.size == 0


def test_requires_txt_sections() -> None:
    text = (
        "numpy\n\n[:python_version < '3.8']\ntyping\n\n[gpu]\ncupy; sys_platform == 'linux'\n\n[gpu:os_name=='nt']\nx\n"
    )
    lines, unreadable = keep("x", from_requires_txt(text))
    assert unreadable == ()
    assert set(lines) == {
        "numpy",
        'typing; python_version < "3.8"',
        'cupy; sys_platform == "linux" and extra == "gpu"',
        'x; os_name == "nt" and extra == "gpu"',
    }
    assert from_requirements("a\n# b\n  -e .\nc # d\n") == ["a", "c"]


# --- asking little, going on, staying the same -----------------------------------------------------------------------


def test_an_update_costs_one_page_and_the_new_metadata(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 5)
    run(index, "peft", folder)
    index.asked.clear()
    run(index, "peft", folder)
    assert dict(index.asked) == {"/simple/peft/": 1}
    new = index.release("peft", "1.9", "2024-06-01", ["torch"])
    index.asked.clear()
    rows = run(index, "peft", folder)
    assert dict(index.asked) == {"/simple/peft/": 1, f"/files/{new}.metadata": 1}
    assert rows["1.9"].requires == ("torch",)


def test_nothing_new_leaves_the_file_alone(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 2)
    run(index, "peft", folder)
    with client(index) as own:
        assert write(harvest("peft", own, folder=folder, cache=folder.parent / "cache"), "2027-01-01", folder) is None
    assert DAY in (folder / "peft.json").read_text()


def test_resumes_after_a_cut(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 12)
    index.fail["/files/peft-1.11-.*"] = [-1]
    with client(index) as own, pytest.raises(IndexUnreachableError):
        harvest("peft", own, folder=folder, cache=folder.parent / "cache")
    assert list(folder.iterdir()) == []
    done = {path for path in index.asked if path.endswith(".metadata") and "1.11" not in path}
    assert done, "the last release failed before any other was read"
    index.fail.clear()
    index.asked.clear()
    assert len(run(index, "peft", folder)) == 12
    assert not done & set(index.asked)


def test_resumes_after_ctrl_c(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 12)

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with client(index) as own, pytest.raises(KeyboardInterrupt):
        harvest("peft", own, folder=folder, cache=folder.parent / "cache", progress=stop)
    first = {path for path in index.asked if path.endswith(".metadata")}
    index.asked.clear()
    assert len(run(index, "peft", folder)) == 12
    assert first and not first & set(index.asked)


def test_a_damaged_cache_is_read_anew(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 2)
    run(index, "peft", folder)
    (folder / "peft.json").unlink()
    for path in (folder.parent / "cache" / "peft").iterdir():
        path.write_text(path.read_text()[:-5])
    assert len(run(index, "peft", folder)) == 2


def test_the_cache_counts_for_the_same_file_only(index: FakeIndex, folder: Path) -> None:
    name = index.release("peft", "1.0", "2024-06-01", ["torch"])
    run(index, "peft", folder)
    (folder / "peft.json").unlink()
    body = wheel("peft", "1.0", ["torch", "numpy"])
    index.add("peft", name, body, "2024-06-01", beside=metadata("peft", "1.0", ["torch", "numpy"]))
    assert set(run(index, "peft", folder)["1.0"].requires) == {"torch", "numpy"}


def test_a_damaged_release_file_is_written_anew(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 2)
    run(index, "peft", folder)
    good = (folder / "peft.json").read_bytes()
    (folder / "peft.json").write_bytes(good[:-20])
    run(index, "peft", folder)
    assert (folder / "peft.json").read_bytes() == good


def test_same_bytes_whatever_the_order_and_way(index: FakeIndex, folder: Path, tmp_path: Path) -> None:
    for i in range(9):
        index.release(
            "peft", f"0.{i}.0", f"2024-01-0{i + 1}", ["torch", f"numpy>=1.{i // 3}", "accelerate"][: 1 + i % 3]
        )
    run(index, "peft", folder)
    text = (folder / "peft.json").read_bytes()
    random.Random(7).shuffle(rows := list(index.files["peft"].items()))
    index.files["peft"] = dict(rows)
    late = {name: row for name, row in rows if "0.8.0" in name or "0.4.0" in name}
    for name in late:
        del index.files["peft"][name]
    other = tmp_path / "other"
    other.mkdir()
    run(index, "peft", other)
    index.files["peft"].update(late)
    run(index, "peft", other)  # grown in two steps
    assert (other / "peft.json").read_bytes() == text
    assert b"127.0.0.1" not in text and b"http" not in text


def test_a_passing_fault_is_tried_again(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 1)
    index.fail["/simple/peft/"] = [503]
    index.fail["/files/.*"] = [429]
    assert len(run(index, "peft", folder)) == 1


# --- refusing --------------------------------------------------------------------------------------------------------


PAGE = b'{"meta": {"api-version": "1.1"}, "name": "peft", "files": []}'


@pytest.mark.parametrize(
    "page",
    [
        b"<html><body>Welcome</body></html>",
        b" ",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        PAGE,
        PAGE[:-4],
        PAGE.replace(b"1.1", b"9.0"),
        PAGE.replace(b"peft", b"other"),
    ],
)
def test_a_nonsense_page_leaves_the_old_file(index: FakeIndex, folder: Path, page: bytes) -> None:
    fill(index, "peft", 3)
    run(index, "peft", folder)
    index.bodies["/simple/peft/"] = page
    error = refused(index, "peft", folder)
    assert error.exit_code == 3 and "peft" in error.cause


def test_errors_slowness_and_cuts_leave_the_old_file(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 3)
    run(index, "peft", folder)
    new = index.release("peft", "1.9", "2024-06-01", ["torch"])
    index.fail["/simple/peft/"] = [-1]
    assert "after 2 tries" in refused(index, "peft", folder).cause
    index.fail = {f"/files/{new}.*": [-1]}
    assert "HTTP 500" in refused(index, "peft", folder).cause
    index.fail = {"/simple/peft/": [401] * 5}
    assert "HTTP 401" in refused(index, "peft", folder).cause
    index.fail = {}
    index.trickle = {"/simple/peft/"}
    sent = index.sent["/simple/peft/"]
    assert "out of time" in refused(index, "peft", folder, deadline_s=0.5).cause
    assert index.sent["/simple/peft/"] - sent < 500, "it waited for the whole page"
    index.trickle = set()
    index.bodies[f"/files/{new}.metadata"] = b"Metadata-Version: 2.1\nName: peft\nVersion: 1.9\nRequires-Dist: evil\n"
    assert "hash" in refused(index, "peft", folder).cause
    assert "unknown-project" in refused(index, "unknown-project", folder).cause


def test_metadata_that_is_none_is_refused(index: FakeIndex, folder: Path) -> None:
    index.add("peft", "peft-1.0-py3-none-any.whl", b"x" * 70_000, "2024-01-01")
    assert "not a readable wheel" in refused(index, "peft", folder).cause
    index.add("peft", "peft-1.0-py3-none-any.whl", b"x", "2024-01-01", beside=b"<html>")
    assert "not core metadata" in refused(index, "peft", folder).cause
    index.files["peft"] = {}
    index.add("peft", "peft-1.0.tar.gz", b"x" * 100, "2024-01-01")
    assert "source archive" in refused(index, "peft", folder).cause


def test_a_page_without_upload_times_is_refused(index: FakeIndex, folder: Path) -> None:
    filename = index.release("peft", "1.0", "2024-01-01", [])
    del index.files["peft"][filename]["upload-time"]
    assert "upload times" in refused(index, "peft", folder).cause


def test_losing_more_than_one_percent_is_refused(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 200)
    run(index, "peft", folder)
    gone = ["1.7", "1.8", "1.9"]
    kept = {version: index.files["peft"].pop(f"peft-{version}-py3-none-any.whl") for version in gone}
    error = refused(index, "peft", folder)
    assert isinstance(error, HarvestRefusedError)
    assert "3 of 200" in error.cause and "1.7, 1.8, 1.9" in error.cause
    index.files["peft"]["peft-1.9-py3-none-any.whl"] = kept["1.9"]
    assert len(run(index, "peft", folder)) == 198, "one in a hundred may go"


def test_a_small_package_may_lose_a_release_on_purpose_only(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 3)
    run(index, "peft", folder)
    del index.files["peft"]["peft-1.1-py3-none-any.whl"]
    refused(index, "peft", folder)
    assert list(run(index, "peft", folder, accept_loss=True)) == ["1.0", "1.2"]


def test_losing_the_wheels_counts_as_loss(index: FakeIndex, folder: Path) -> None:
    fill(index, "peft", 2)
    run(index, "peft", folder)
    index.files["peft"] = {}
    for version in ("1.0", "1.1"):
        index.add("peft", f"peft-{version}.tar.gz", sdist("peft", version, {"requirements.txt": "torch"}), "2024-05-01")
    assert isinstance(refused(index, "peft", folder), HarvestRefusedError)


def test_settings_that_cannot_work_say_so() -> None:
    with pytest.raises(IndexUnreachableError, match="no-index"):
        Index(PipSettings(no_index=True))
    with pytest.raises(IndexUnreachableError, match="not a web address"):
        Index(PipSettings(index_url="file:///srv/simple"))


def test_credentials_stay_out_of_messages(index: FakeIndex, folder: Path) -> None:
    address = index.url.replace("://", "://someone:s3cret@")
    index.fail["/simple/peft/"] = [-1]
    own = Index(PipSettings(index_url=address), attempts=2, wait_s=0.01)
    with own, pytest.raises(IndexUnreachableError) as caught:
        harvest("peft", own, folder=folder, cache=folder)
    assert "s3cret" not in caught.value.render() and "someone" not in caught.value.render()


# --- wheels' contents ------------------------------------------------------------------------------------------------


def test_wheel_files_and_cuda_libraries(index: FakeIndex) -> None:
    names = ["bitsandbytes/libbitsandbytes_cuda118.so", "bitsandbytes/libbitsandbytes_cuda126.so",
             "bitsandbytes/libbitsandbytes_cuda102_nocublaslt.so", "bitsandbytes/libbitsandbytes_cpu.so"]  # fmt: skip
    body = wheel("bitsandbytes", "0.46.0", [], dict.fromkeys(names, "\x7fELF"))
    index.add("bitsandbytes", "bitsandbytes-0.46.0-py3-none-manylinux_2_24_x86_64.whl", body, "2025-05-27")
    with client(index) as own:
        files = wheel_files("bitsandbytes", "0.46.0", own)
        with pytest.raises(UsageError, match=r"no Linux wheel of bitsandbytes 9\.9"):
            wheel_files("bitsandbytes", "9.9", own)
        index.ranges = False
        with pytest.raises(IndexUnreachableError, match="ranged reads"):
            wheel_files("bitsandbytes", "0.46.0", own)
    assert files == sorted(files) and set(names) < set(files)
    assert cuda_libraries(files) == ("118", "126")
    assert cuda_libraries(files, suffix="_nocublaslt") == ("102",)


def test_transformers_floors(index: FakeIndex) -> None:
    members = {
        "transformers/dependency_versions_table.py": 'deps = {"torch": "torch>=2.6", "av": "av", "ftfy": "ftfy<7"}\n',
        "transformers/utils/import_utils.py": 'ACCELERATE_MIN_VERSION = "1.1.0"\nXLA_FSDPV2_MIN_VERSION = "2.2.0"\n'
        'if bad:\n    logger.warning(f"Disabling PyTorch because PyTorch >= 2.6 is required but found {v}")\n',
        "transformers/integrations/peft.py": 'MIN_PEFT_VERSION = "0.22.0"\n',
    }
    body = wheel("transformers", "5.24.0", [], members)
    index.add("transformers", "transformers-5.24.0-py3-none-any.whl", body, "2026-11-21")
    with client(index) as own:
        floors = transformers_floors("5.24.0", own)
    assert floors.table == {"torch": ">=2.6", "av": "", "ftfy": "<7"}
    assert floors.minimums == {"accelerate": "1.1.0", "xla-fsdpv2": "2.2.0"}
    assert (floors.torch, floors.peft) == ("2.6", "0.22.0")


# --- plain words and the command -------------------------------------------------------------------------------------


def row(version: str, *requires: str, **values: Any) -> Release:
    fields: dict[str, Any] = {"uploaded": "2026-12-10", "python": ">=3.11", "wheels": ("py3-none-any",), "sdist": True}
    return Release(version=version, requires=requires, **{**fields, "yanked": False, "size": 1, **values})


def test_news_in_plain_words() -> None:
    old = [row("5.23.0", "huggingface-hub<3.0,>=1.30", "tqdm"), row("5.24.0", "huggingface-hub<3.0,>=1.31", "numpy")]
    optional = 'torch>=2.4; extra == "torch"'
    new = [
        old[0],
        row("5.24.0", *old[1].requires, yanked=True),
        row("5.25.0rc1", "numpy>=9"),
        row("5.25.0", "huggingface-hub<3.0,>=1.31", optional, "peft>=0.22", python=">=3.12"),
    ]
    said = news("transformers", old, new, {"huggingface-hub", "numpy", "torch", "peft"})
    assert said == [
        "transformers 5.24.0: yanked",
        "transformers 5.25.0rc1: new, 2026-12-10; needs numpy >=9; no longer needs huggingface-hub",
        "transformers 5.25.0: new, 2026-12-10; needs python >=3.12; "
        "needs huggingface-hub >=1.31,<3.0 (was >=1.30,<3.0); needs peft >=0.22",
    ], "5.24.0 is yanked and rc1 a pre-release: 5.25.0 is compared with 5.23.0"
    assert news("transformers", old, old[:1], set()) == ["transformers 5.24.0: gone from the index"]
    assert news("transformers", [], new, set()) == ["transformers: 4 releases, 5.23.0 to 5.25.0"]


# --- the real index, the real files ----------------------------------------------------------------------------------


@pytest.mark.index
def test_the_configured_index(tmp_path: Path) -> None:
    with Index(read_pip_settings(), deadline_s=300) as own:
        found = harvest("hf-transfer", own, folder=tmp_path, cache=tmp_path / "cache")
    known = {release.version: release for release in load_releases("hf-transfer")}
    fresh = {release.version: release for release in found.releases}
    assert known.keys() <= fresh.keys()
    for version, release in known.items():
        assert (fresh[version].requires, fresh[version].wheels) == (release.requires, release.wheels)


def test_every_package_has_its_file_and_all_are_small() -> None:
    files = sorted(RELEASES.glob("*.json"))
    assert {path.stem for path in files} == set(PACKAGES)
    assert sum(path.stat().st_size for path in files) < 4_000_000
    for path in files:
        assert "://" not in path.read_text(encoding="utf-8"), path.name
