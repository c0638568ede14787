"""`envforge matrix update` against a stand-in index: what it tells, what it writes, and what it leaves alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harvest_index import FakeIndex, metadata, serve, wheel
from typer.testing import CliRunner

from envforge import settings
from envforge.errors import IndexUnreachableError, UsageError
from envforge.harvest import news
from envforge.keep.newer import wanted
from envforge.matrix.load import DATA, load_matrix
from envforge.matrix.releases import RELEASES, Release, load_releases
from envforge.resolver.request import parse_request


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeIndex]:
    """An index that has exactly what the shipped matrix has of peft and hf-transfer; pip is pointed at it."""
    with serve(FakeIndex()) as fake:
        for key in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(key, raising=False)
        monkeypatch.setenv("PIP_INDEX_URL", fake.url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setattr(settings, "SITE", tmp_path / "site")
        for name in ("peft", "hf-transfer"):
            for row in load_releases(name):
                mirror(fake, name, row)
        yield fake


def mirror(fake: FakeIndex, name: str, row: Release) -> None:
    """One known release as the index shows it: the same tags, dates and sizes; nobody reads the bodies."""
    for tag in row.wheels:
        filename = f"{name.replace('-', '_')}-{row.version}-{tag}.whl"
        fake.add(name, filename, b"", row.uploaded, python=row.python or None, yanked=row.yanked)
        fake.files[name][filename]["size"] = row.size
    if row.sdist:
        fake.add(name, f"{name}-{row.version}.tar.gz", b"", row.uploaded, python=row.python or None, yanked=row.yanked)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the matrix to update."""
    shutil.copytree(DATA, tmp_path / "matrix" / "data")
    shutil.copytree(RELEASES, tmp_path / "matrix" / "releases")
    return tmp_path / "matrix"


def run(*words: str) -> tuple[int, str, str]:
    from typer import Typer

    from envforge.cli import matrix, resolve

    app = Typer()
    for module in (matrix, resolve):
        module.register(app)
    result = CliRunner().invoke(app, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def update(folder: Path, *words: str) -> tuple[int, str, str]:
    return run("matrix", "update", *words, "--folder", str(folder))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_new_costs_one_page(index: FakeIndex, folder: Path) -> None:
    before = content(folder)
    code, out, err = update(folder, "peft", "--write")
    assert (code, out) == (0, "nothing new: peft\n")
    assert "1 requests to the index" in err
    assert content(folder) == before
    assert dict(index.asked) == {"/simple/peft/": 1}


def test_a_new_release_is_told_with_what_it_means_and_written_when_asked(index: FakeIndex, folder: Path) -> None:
    index.release("peft", "0.22.0", "2026-12-05", ["torch>=2.4", "transformers", "numpy>=1.17"], python=">=3.10.0")
    before = content(folder)
    code, out, err = update(folder, "peft", "hf-transfer")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("peft 0.22.0: new, 2026-12-05"))
    assert "needs torch >=2.4" in line
    assert "lmdeploy 0.18.0 caps it at 0.14.0" in line
    assert "nothing new: hf-transfer" in out
    moved = [text for text in out.splitlines() if "peft 0.21.2 -> 0.22.0" in text]
    assert any("llama3-transformers on" in text for text in moved), out
    assert "nothing was written; add --write" in err
    assert content(folder) == before
    assert sum(index.asked.values()) == 3, "two pages and one METADATA"

    code, out, err = update(folder, "peft", "--write", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["written"] == ["peft.json", "policy.yaml"]
    assert data["packages"][0]["changed"] is True and data["users"]
    after = content(folder)
    assert {name for name in after if after[name] != before.get(name)} == {"releases/peft.json", "data/policy.yaml"}
    assert b'as_of: "2026-12-05"' in after["data/policy.yaml"], "the matrix is as new as its newest release"
    assert load_releases("peft", folder / "releases")[-1].version == "0.22.0"
    told, known = load_releases("peft", folder / "releases")[:-1], load_releases("peft")
    assert [row._replace(requires=()) for row in told] == [row._replace(requires=()) for row in known]
    assert [set(row.requires) for row in told] == [set(row.requires) for row in known]


def test_what_a_new_transformers_checks_at_run_time_becomes_rows(index: FakeIndex, folder: Path) -> None:
    for row in load_releases("transformers"):
        mirror(index, "transformers", row)
    members = {
        "transformers/dependency_versions_table.py": 'deps = {"torch": "torch>=2.8"}\n',
        "transformers/utils/import_utils.py": 'ACCELERATE_MIN_VERSION = "1.1.0"\nBITSANDBYTES_MIN_VERSION = "0.49.9"\n'
        'if bad:\n    logger.warning(f"Disabling PyTorch because PyTorch >= 2.8 is required but found {v}")\n',
        "transformers/integrations/peft.py": 'MIN_PEFT_VERSION = "0.21.0"\n',
    }
    needs = list(load_releases("transformers")[-1].requires)
    body = wheel("transformers", "5.99.0", needs, members)
    beside = metadata("transformers", "5.99.0", needs)
    index.add("transformers", "transformers-5.99.0-py3-none-any.whl", body, "2026-12-06", beside=beside)
    before = (folder / "data" / "transformers-floors.yaml").read_text()
    code, out, _ = update(folder, "transformers", "--write")
    assert code == 0
    told = [line for line in out.splitlines() if line.startswith("new row, read from the wheel: ")]
    assert index.asked["/simple/transformers/"] == 1, "the page that the harvest read serves the floors too"
    assert len(told) == 2 and "asks for bitsandbytes >=0.50.0" in told[0], "0.49.9 is no release: the next one is named"
    assert "with torch <2.8 transformers silently" in told[1]
    assert "checks peft >=0.21.0 only, the row says >=0.22.0" in out, "a floor that fell needs a hand"
    after = load_matrix(folder / "data")
    rules = {rule.id: rule for rule in after.rules}
    assert rules["transformers-torch-5.99.0"].needs == {"torch": ">=2.8"}
    assert rules["transformers-torch-5.99.0"].level == "hard"
    assert "5.99.0 wheel contents" in rules["transformers-torch-5.99.0"].source.text
    assert rules["transformers-bitsandbytes-5.99.0"].warning == "transformers-table"
    kept = set(before.splitlines()) - set((folder / "data" / "transformers-floors.yaml").read_text().splitlines())
    assert not kept, "rows are added, none is changed"


@pytest.mark.parametrize("mood", ["500", "nonsense", "another project", "lost", "slow"])
def test_a_bad_index_leaves_everything_as_it_is(index: FakeIndex, folder: Path, mood: str) -> None:
    if mood == "500":
        index.fail["/simple/peft/"] = [-1]
    elif mood == "nonsense":
        index.bodies["/simple/peft/"] = b"<html>welcome</html>"
    elif mood == "another project":
        index.bodies["/simple/peft/"] = index.page("hf-transfer")
    elif mood == "lost":
        for filename in list(index.files["peft"])[:4]:
            del index.files["peft"][filename]
    else:
        index.trickle.add("/simple/peft/")
    before = content(folder)
    patience = ("--deadline", "3") if mood in ("slow", "500") else ()
    code, _, err = update(folder, "peft", "--write", *patience)
    assert code == 3
    assert "peft: left as it is: " in err
    assert content(folder) == before
    if mood == "lost":
        assert "no longer shows" in err and "--accept-loss" in err


def test_one_package_failing_does_not_stop_the_others(index: FakeIndex, folder: Path) -> None:
    index.fail["/simple/hf-transfer/"] = [-1]
    index.release("peft", "0.21.3", "2026-11-20", ["torch>=1.13.0"])
    code, out, _ = update(folder, "hf-transfer", "peft", "--write", "--deadline", "20", "--json")
    data = json.loads(out)
    assert code == 3
    assert [(one["name"], one["changed"], bool(one["error"])) for one in data["packages"]] == [
        ("hf-transfer", False, True), ("peft", True, False),
    ]  # fmt: skip
    assert data["written"] == ["peft.json"]


def test_names_are_checked_before_anything_is_asked(index: FakeIndex, folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        update(folder, "peft", "transformer")
    assert "did you mean transformers" in caught.value.hint
    assert not index.asked
    with pytest.raises(UsageError):
        run("matrix", "update", "peft", "--folder", "/nowhere")


def test_caps_are_named_beside_the_news() -> None:
    from envforge.keep.update import with_caps

    transformers = load_releases("transformers")
    newest = transformers[-1]
    lines = news("transformers", transformers[:-1], transformers, ["torch", "transformers"])
    [line] = with_caps("transformers", lines, load_releases)
    assert line.startswith(f"transformers {newest.version}: new, {newest.uploaded}")
    assert "unsloth 2026.10.9 caps it at 5.17.0" in line


# --- releases newer than the matrix ----------------------------------------------------------------------------------


def requests(*lines: str) -> list[Any]:
    return [parse_request(line) for line in lines]


def test_which_pins_are_newer() -> None:
    asked = requests("peft==0.99.0", "torch==2.6.0", "torch==2.6.9", "leftpad==9.0", "transformers>=9", "trl==0.20rc1")
    assert wanted(asked) == [("peft", "0.99.0")]


ASK = ("--driver", "none", "--json")


def test_a_newer_release_is_looked_up_once_and_said(index: FakeIndex) -> None:
    index.release("peft", "0.23.0", "2026-12-24", ["torch>=2.4", "transformers>=5", "numpy>=1.17"], python=">=3.10")
    code, out, _ = run("resolve", "peft==0.23.0", "transformers", *ASK)
    data = json.loads(out)
    assert code == 0, data
    assert data["pins"]["peft"] == "0.23.0"
    assert int(data["pins"]["transformers"].split(".")[0]) >= 5
    [warning] = [w for w in data["warnings"] if w["id"] == "newer-than-matrix"]
    assert "peft 0.23.0 of 2026-12-24 is newer than the matrix (newest there: 0.21.2)" in warning["text"]
    assert warning in data["plan"]["warnings"]
    assert index.asked["/simple/peft/"] == 1
    assert sum(index.asked.values()) == 2


def test_its_needs_count(index: FakeIndex) -> None:
    index.release("peft", "0.23.0", "2026-12-24", ["torch>=99"])
    code, out, _ = run("resolve", "peft==0.23.0", *ASK)
    assert code == 1
    assert "peft 0.23.0 needs a torch" in json.loads(out)["conflict"]["text"]


def test_a_version_that_the_index_has_not_either_is_a_plain_no(index: FakeIndex) -> None:
    code, out, _ = run("resolve", "peft==0.99.0", *ASK)
    assert code == 1
    assert "no such release is known" in json.loads(out)["conflict"]["text"]


def test_known_releases_ask_nothing(index: FakeIndex) -> None:
    run("resolve", "peft==0.15.2", "transformers", *ASK)
    assert not index.asked


def test_offline_says_what_to_do(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(IndexUnreachableError) as caught:
        run("resolve", "peft==0.99.0", *ASK)
    assert caught.value.exit_code == 3
    assert "peft==0.99.0 is newer than the matrix" in caught.value.cause
    assert "pin a release that the matrix knows" in caught.value.hint
    assert not index.asked


# --- damaged files ---------------------------------------------------------------------------------------------------


def test_a_damaged_release_file_stops_only_who_needs_it(folder: Path) -> None:
    from envforge.errors import DataError
    from envforge.matrix.load import load_matrix
    from envforge.resolver.hosts import Host
    from envforge.resolver.resolve import Wish, resolve

    path = folder / "releases" / "lmdeploy.json"
    path.write_bytes(path.read_bytes()[:1000])

    def load(name: str) -> tuple[Release, ...]:
        return load_releases(name, folder / "releases")

    def ask(*lines: str) -> Any:
        return resolve(load_matrix(), Wish(tuple(requests(*lines)), (Host("cpu", None),)), load)

    assert ask("transformers", "peft").plan is not None
    with pytest.raises(DataError, match=r"lmdeploy\.json: the generated release file is damaged") as caught:
        ask("lmdeploy")
    assert "envforge matrix update lmdeploy --write" in caught.value.hint
