"""Settings and matrix rows in layers: site < user < project < variables < options, and where each came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envforge import settings
from envforge.errors import DataError, UsageError
from envforge.matrix.load import load_matrix
from envforge.settings import find_project, layered_matrix, load_settings


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders in place of /etc/envforge, the user's configuration and the current folder."""
    for name in ("site", "user/envforge", "project"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(settings, "SITE", tmp_path / "site")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    for key in settings.KEYS:
        monkeypatch.delenv(settings.PREFIX + key.upper(), raising=False)
    (tmp_path / "project" / "image.yaml").write_text("name: mine\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(machine: Path, site: str = "", user: str = "", project: str = "") -> None:
    (machine / "site" / "config.toml").write_text(site)
    (machine / "user" / "envforge" / "config.toml").write_text(user)
    (machine / "project" / "envforge.toml").write_text(project)


def test_nothing_set(machine: Path) -> None:
    found = load_settings(machine / "project")
    assert (found.mirrors, found.ca, found.registry, found.fleet, found.mounts, found.banned) == (
        {},
        None,
        None,
        None,
        (),
        (),
    )
    assert found.layers == ()
    assert set(found.origins.values()) == {("built-in",)}


def test_higher_layers_win(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine, 'registry = "site.example/a"', 'registry = "user.example/b"', 'registry = "project.example/c"')
    project = machine / "project"
    assert load_settings(project).registry == "project.example/c"
    assert load_settings().registry == "user.example/b"  # the current folder is no project
    monkeypatch.setenv("ENVFORGE_REGISTRY", "variable.example")
    assert load_settings(project).registry == "variable.example"
    found = load_settings(project, {"registry": "option.example", "ca": None})
    assert found.registry == "option.example"
    assert found.origins["registry"] == ("option --registry",)
    assert found.origins["ca"] == ("built-in",)


def test_mirrors_merge_and_bans_add_up(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        machine,
        'mirrors = {pypi = "https://site.example/pypi/", torch = "https://site.example/t"}\nbanned = ["numpy>=2.5"]',
        '[mirrors]\npypi = "https://user.example/pypi"',
        'banned = ["Transformers==4.57.0", "numpy>=2.5"]',
    )
    monkeypatch.setenv("ENVFORGE_BANNED", "trl")
    found = load_settings(machine / "project")
    assert found.mirrors == {"index": "https://user.example/pypi", "torch": "https://site.example/t"}
    assert found.banned == (("numpy", ">=2.5"), ("transformers", "==4.57.0"), ("trl", ">=0.dev0"))
    assert [origin.split(" (")[0] for origin in found.origins["banned"]] == [
        "site",
        "project",
        "variable ENVFORGE_BANNED",
    ]


def test_paths_are_relative_to_their_file(machine: Path) -> None:
    write(machine, 'ca = "site.pem"', "", 'fleet = "fleet.yaml"')
    found = load_settings(machine / "project")
    assert found.ca == machine / "site" / "site.pem"
    assert found.fleet == machine / "project" / "fleet.yaml"


def test_every_fault_is_told_with_its_place(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        machine,
        '# comment\nregistrie = "x"\nregistry = "https://x"\nmounts = ["scratch"]',
        '\nmirrors = {pipy = "https://x"}\nbanned = ["numpy at 2"]\nca = 5\n',
        "registry = [\n",
    )
    monkeypatch.setenv("ENVFORGE_MIRRORS", "conda=https://x")
    with pytest.raises(DataError) as caught:
        load_settings(machine / "project")
    lines = [line.replace(f"{machine}/", "") for line in caught.value.cause.split("\n")]
    assert [line.split(": ")[0] for line in lines] == [
        "site/config.toml:2", "site/config.toml:3", "site/config.toml:4",
        "user/envforge/config.toml:2", "user/envforge/config.toml:3", "user/envforge/config.toml:4",
        "project/envforge.toml:1", "ENVFORGE_MIRRORS",
    ]  # fmt: skip
    assert "did you mean registry?" in lines[0]
    assert "'numpy at 2' is not of the form" in lines[4]
    assert "unknown kind of mirror 'conda'" in lines[7]


def test_bytes_that_are_no_text(machine: Path) -> None:
    (machine / "site" / "config.toml").write_bytes(b'\nregistry = "\xff"\n')
    with pytest.raises(DataError, match=r"config\.toml:2: not UTF-8"):
        load_settings()


def test_a_project_is_known_by_its_files(machine: Path) -> None:
    assert find_project(machine / "project") == machine / "project"
    assert find_project(machine / "site") is None


RULE = """rules:
- id: {id}
  level: hard
  when: {{transformers: ">=5.0"}}
  needs: {{torch: ">=2.{torch}"}}
  text: our drivers need it
  source: {{text: our own tests, confidence: verified-by-execution}}
"""


def rows(machine: Path, place: str, torch: int, id: str = "ours") -> None:
    folder = machine / place / "matrix.d"
    folder.mkdir(exist_ok=True)
    (folder / "rows.yaml").write_text(RULE.format(id=id, torch=torch))


def test_rows_of_site_user_and_project_lie_over_the_shipped_ones(machine: Path) -> None:
    shipped = load_matrix()
    assert layered_matrix(machine / "project").hash == shipped.hash
    rows(machine, "site", 6)
    rows(machine, "user/envforge", 7)
    rows(machine, "user/envforge", 7)
    matrix = layered_matrix(machine / "project")
    assert [rule.needs["torch"] for rule in matrix.rules if rule.id == "ours"] == [">=2.7"]
    assert len(matrix.rules) == len(shipped.rules) + 1
    rows(machine, "project", 8)
    assert [r.needs["torch"] for r in layered_matrix(machine / "project").rules if r.id == "ours"] == [">=2.8"]
    assert [r.needs["torch"] for r in layered_matrix().rules if r.id == "ours"] == [">=2.7"]
    assert layered_matrix(machine / "project").hash != matrix.hash


def test_a_gpu_of_the_site_is_known_to_detect(machine: Path) -> None:
    record = machine / "record"
    record.mkdir()
    (record / "nvidia-smi-query.csv").write_text(
        "0, NVIDIA House Card, 570.86.15, [N/A], 81559, 1, Disabled, GPU-1, 0000:01:00.0\n"
    )
    (record / "nvidia-smi.txt").write_text(
        "| NVIDIA-SMI 570.86.15   Driver Version: 570.86.15   CUDA Version: 12.8 |\n"
    )

    def capability() -> object:
        code, out = run("detect", "--recorded", str(record), "--json")
        assert code == 0
        return json.loads(out)["gpus"][0]["sm"]

    assert capability() is None
    (machine / "site" / "matrix.d").mkdir()
    (machine / "site" / "matrix.d" / "gpus.yaml").write_text(
        'sources:\n  ours: {text: "our cluster", confidence: verified-by-execution}\n'
        'gpus:\n- {name: House Card, sm: "9.0", memory_gib: [80], architecture: Hopper, bf16: true, fp8: true, '
        'data_center: true, forward: true, first_cuda: "11.8", source: ours}\n'
    )
    assert capability() == "9.0"


def test_a_fault_in_a_layer_names_its_file(machine: Path) -> None:
    rows(machine, "site", 6)
    path = machine / "site" / "matrix.d" / "rows.yaml"
    path.write_text(path.read_text().replace("level: hard", "level: harsh"))
    with pytest.raises(DataError, match=r"rows.yaml:3: rules row 1 field level: \"harsh\" is not allowed"):
        layered_matrix()


def run(*words: str) -> tuple[int, str]:
    from typer import Typer

    from envforge.cli import config, detect, matrix, resolve

    app = Typer()
    for module in (config, detect, matrix, resolve):
        module.register(app)
    result = CliRunner().invoke(app, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_config_show_tells_where_each_value_came_from(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine, 'registry = "site.example"\nmirrors = {pypi = "https://me:secret@mirror.example/simple"}')
    monkeypatch.setenv("ENVFORGE_MOUNTS", "/scratch /data:/data:ro")
    code, out = run("config", "show", str(machine / "project"))
    assert code == 0
    assert f"registry: site.example\n    from site ({machine}/site/config.toml)" in out
    assert "mounts: /scratch, /data:/data:ro\n    from variable ENVFORGE_MOUNTS" in out
    assert "secret" not in out
    code, out = run("config", "show", str(machine / "project"), "--json")
    found = {row["key"]: row for row in json.loads(out)["settings"]}
    assert found["mounts"]["value"] == ["/scratch", "/data:/data:ro"]
    assert found["ca"] == {"key": "ca", "value": None, "origins": ["built-in"]}
    assert [layer["there"] for layer in json.loads(out)["layers"]] == [True, True, True]
    with pytest.raises(UsageError):
        run("config", "show", str(machine / "nowhere"))


def test_banned_versions_and_layers_reach_the_answer(machine: Path) -> None:
    ask = ("resolve", "transformers>=4.50,<5", "--variant", "cpu", "--driver", "none", "--json")
    code, out = run(*ask)
    assert code == 0
    before = json.loads(out)
    write(machine, f'banned = ["transformers=={before["pins"]["transformers"]}"]')
    rows(machine, "site", 6)
    code, out = run(*ask)
    after = json.loads(out)
    assert code == 0
    assert after["pins"]["transformers"] != before["pins"]["transformers"]
    assert after["plan"]["matrix_hash"] != before["plan"]["matrix_hash"]
    assert after["plan"]["matrix_as_of"] == before["plan"]["matrix_as_of"]
    code, out = run(*(*ask[:1], f"transformers=={before['pins']['transformers']}", *ask[2:]))
    assert code == 1
    assert "banned" in json.loads(out)["conflict"]["text"]
