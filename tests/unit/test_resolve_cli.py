"""The command line of resolve: requests as people have them, bad input, outages, and the same bytes every time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from lock_index import StandIn, quiet
from test_lock_local import project as source_folder
from test_lock_local import repository

from envforge.cli.app import application
from envforge.cli.run import run

A100 = ("--driver", "550.54.15", "--gpu", "NVIDIA A100-SXM4-80GB")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings of pip and uv on this machine play no part; no index answers (port 9 discards)."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "ENVFORGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")


def envforge(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """-> exit code, stdout, stderr."""
    code = run(application(), [str(word) for word in words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err and "fault of envforge" not in err, err
    return code, out, err


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    code, out, err = envforge(capsys, "resolve", *words, "--json")
    assert code in (0, 1), err
    data: dict[str, Any] = json.loads(out)
    return data


# --- requests ------------------------------------------------------------------------------------------------------


def test_contradictory_requests_are_both_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = envforge(capsys, "resolve", "torch==2.1.0", "torch==2.2.0", "--driver", "none")
    assert code == 1 and not out
    assert "torch==2.1.0" in err and "torch==2.2.0" in err and "hint:" in err


def test_files_constraints_hashes_and_markers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "limits.txt").write_text("numpy<2\npeft==0.13.2\n")
    (tmp_path / "more.txt").write_text("accelerate  # for Trainer\n")
    text = """\
        -c limits.txt
        -r more.txt
        --index-url https://example.org/simple
        torch==2.4.1 \\
            --hash=sha256:0000000000000000000000000000000000000000000000000000000000000000
        transformers>=4.44,<4.46 ; python_version >= "3.8"
        tokenizers==0.10.0 ; python_version < "3"
        """
    (tmp_path / "requirements.txt").write_text(textwrap.dedent(text))
    data = answer(capsys, "-r", tmp_path / "requirements.txt", "--driver", "none")
    assert data["status"] == "ok" and data["pins"]["torch"] == "2.4.1" and data["pins"]["numpy"].startswith("1.")
    assert "peft" not in data["pins"]  # a constraint pulls nothing in
    assert any(w["id"] == "marker-not-met" and "tokenizers==0.10.0" in w["text"] for w in data["warnings"])


def test_a_file_that_includes_itself_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("-r b.txt\n")
    (tmp_path / "b.txt").write_text("-r a.txt\n")
    code, _, err = envforge(capsys, "resolve", "-r", tmp_path / "a.txt", "--driver", "none")
    assert code == 2 and "includes itself" in err


def test_packages_outside_the_matrix_stay_in_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = envforge(capsys, "resolve", "torch==2.13.0", "humanize>=4", "--driver", "none")
    assert code == 0 and "\nhumanize>=4\n" in out and "outside-matrix" in out


def test_a_slip_in_a_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = envforge(capsys, "resolve", "transfomers", "--driver", "none")
    assert code == 2 and "did you mean transformers" in err


def test_other_urls_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = envforge(capsys, "resolve", "torch @ https://example.org/torch.whl", "--driver", "none")
    assert code == 2 and "git+URL@COMMIT" in err


def test_an_address_stays_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    line = "peft @ git+https://example.org/peft@0123456789012345678901234567890123456789"
    code, out, _ = envforge(capsys, "resolve", line, "--driver", "none")
    assert code == 0 and f"\n{line}\n" in out


def test_an_address_needs_a_folder_for_its_wheel(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = envforge(capsys, "resolve", f"peft @ file://{tmp_path}", "--driver", "none", "--lock")
    assert code == 2 and "envforge init" in err


def test_pips_constraints_count_where_a_lock_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limits.txt").write_text("peft<0.20  # ours\n--no-binary x\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "limits.txt"))
    code, _, err = envforge(capsys, "resolve", "peft==0.21.1", "--driver", "none", "--lock")
    assert code == 1 and "peft<0.20 is a constraint (pip's constraints on this machine)" in err
    code, out, _ = envforge(capsys, "resolve", "peft==0.21.1", "--driver", "none")
    assert code == 0 and "peft==0.21.1" in out, "an answer without a lock is not about this machine"


def test_mirrors_stand_for_the_usual_places(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in: an index and a PyTorch index on loopback; pip is told an index that does not answer."""
    quiet(monkeypatch, tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    line = ("resolve", "six", "--driver", "none", "--lock")
    with StandIn() as index:
        wheel = index.add("simple", "six", "1.16.0")
        assert envforge(capsys, *line)[0] == 3, "nothing answers without a mirror"
        mirrors = ("--mirror", f"index={index.url}/simple", "--mirror", f"torch={index.url}/whl")
        code, out, err = envforge(capsys, *line, *mirrors)
        assert code == 0 and wheel.sha256 in out, err
        assert any("/whl/cpu/torch/" in asked for asked in index.log), "the PyTorch index is the mirror too"
    assert envforge(capsys, "resolve", "six", "--driver", "none", "--mirror", "index")[0] == 2
    assert "npm" in envforge(capsys, "resolve", "six", "--driver", "none", "--mirror", "npm=https://x.example")[2]


# --- starting points -----------------------------------------------------------------------------------------------


def test_a_plan_a_pylock_and_pins_are_starting_points(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = answer(capsys, "torch==2.6.0", "transformers==4.48.0", "peft==0.14.0", *A100)
    plan = tmp_path / "answer.json"
    plan.write_text(json.dumps(first))
    free = answer(capsys, "torch", "transformers", "peft", *A100)
    assert free["pins"]["torch"] != "2.6.0"
    kept = answer(capsys, "torch", "transformers", "peft", *A100, "--from", plan)
    assert kept["pins"] == first["pins"] and kept["variant"] == first["variant"]
    moved = answer(capsys, "torch", "transformers", "peft", *A100, "--from", plan, "--upgrade", "peft")
    assert moved["pins"]["peft"] != "0.14.0" and moved["pins"]["torch"] == "2.6.0"

    rows = "".join(f'[[packages]]\nname = "{n}"\nversion = "{v}"\n' for n, v in first["pins"].items() if n != "torch")
    rows += '[[packages]]\nname = "torch"\nversion = "2.6.0+cu118"\n'
    (tmp_path / "pylock.toml").write_text(
        f'lock-version = "1.0"\ncreated-by = "t"\nrequires-python = "==3.11.*"\n{rows}'
    )
    locked = answer(capsys, "torch", "transformers", "peft", *A100, "--from", tmp_path / "pylock.toml")
    assert (locked["variant"], locked["python"]) == ("cu118", "3.11")
    assert locked["pins"].items() <= first["pins"].items()  # torch wants setuptools from Python 3.12 on only

    (tmp_path / "pins.txt").write_text("torch==2.6.0\ntransformers==4.48.0\nrich\n")
    pinned = answer(capsys, "torch", "transformers", *A100, "--from", tmp_path / "pins.txt")
    assert (pinned["pins"]["torch"], pinned["pins"]["transformers"]) == ("2.6.0", "4.48.0")


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("{", "x.json", "not an envforge plan"),
        ("a = 1\n", "x.toml", "no pylock"),
        ("a = ", "x.toml", "not TOML"),
        ("rich\n", "x.txt", "pins nothing"),
    ],
)
def test_other_starting_points_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, name: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    code, _, err = envforge(capsys, "resolve", "torch", "--driver", "none", "--from", tmp_path / name)
    assert code == 2 and says in err and name in err


def test_upgrade_wants_something_to_upgrade(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = envforge(capsys, "resolve", "torch", "--driver", "none", "--upgrade", "torch")
    assert code == 2 and "no earlier plan" in err
    (tmp_path / "pins.txt").write_text("torch==2.13.0\n")
    words = ("torch", "--driver", "none", "--from", tmp_path / "pins.txt", "--upgrade", "torhc")
    code, _, err = envforge(capsys, "resolve", *words)
    assert code == 2 and "did you mean torch?" in err


# --- explanations --------------------------------------------------------------------------------------------------


def test_explain_says_what_a_newer_torch_would_need(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("torch", "--driver", "550.54.15", "--gpu", "NVIDIA GeForce RTX 3090")
    _, out, _ = envforge(capsys, "resolve", *words, "--explain")
    said = out[out.index("\ntorch==") :]
    assert (
        "nothing newer than 2.14.1" in said
        and "2.15.0 is built for cu130 and cu132 only" in said
        and "580.65.06" in said
    )
    assert "# variant: driver 550.54.15" in out
    reasons = answer(capsys, *words, "--explain")["reasons"]
    assert any("nothing newer" in row["text"] for row in reasons["torch"]) and reasons["variant"]


def test_a_source_build_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "flash-attn", "torch==2.6.0", *A100)
    (said,) = [w["text"] for w in data["warnings"] if w["id"] == "source-build"]
    assert "nvcc of CUDA 12.4" in said and "ninja" in said and "memory" in said and "--no-compile" in said
    refused = answer(capsys, "flash-attn", "torch==2.6.0", *A100, "--no-compile")
    assert refused["status"] == "conflict" and "--no-compile" in refused["conflict"]["text"]
    assert "--no-compile" in refused["conflict"]["fixes"][0]["change"]


def test_a_fleet_shows_its_ways(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "- {name: v100, driver: 550.54.15, gpus: [Tesla V100-SXM2-32GB]}\n"
        "- {name: h100, driver: 580.82.07, gpus: [NVIDIA H100 80GB HBM3], count: 8}\n"
        "- {name: arm, driver: 580.82.07, gpus: [NVIDIA GH200 480GB], arch: aarch64}\n"
    )
    code, out, err = envforge(capsys, "resolve", "torch", "--fleet", fleet)
    assert code == 1 and "aarch64 and x86_64" in err and "arm (1 host)" in out
    code, out, _ = envforge(capsys, "resolve", "torch", "--fleet", fleet, "--exclude", "arm")
    assert code == 0 and "# one plan for all hosts:" in out and "# 2 plans (one more):" in out and "gains: torch" in out


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [
        "tørch",
        "torch==2.1 torch==2.2",
        "torch[",
        "@",
        "torch @",
        "=" * 200,
        "t" * 9000,
        "a\x00b",
        "./nothing-here",
        "torch~=2",
        "torch>=two",
    ],
)
def test_words_that_are_no_requirement(capsys: pytest.CaptureFixture[str], word: str) -> None:
    code, out, err = envforge(capsys, "resolve", word, "--driver", "none")
    assert code == 2 and not out and "hint:" in err and len(err) < 600


@pytest.mark.parametrize("line", ["torch==1.99", "torch>=1!2", "torch===foo", "torch>3,<2", "torch==2.13.0+cu999"])
def test_versions_that_do_not_exist_are_a_conflict(capsys: pytest.CaptureFixture[str], line: str) -> None:
    code, _, err = envforge(capsys, "resolve", line, "--driver", "none")
    assert code == 1 and line in err


def test_a_pin_above_every_release_is_looked_up_and_the_outage_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = envforge(capsys, "resolve", "torch==99999999999999999999.1", "--driver", "none")
    assert code == 3 and "torch" in err and len(err) < 900


def test_a_version_longer_than_any_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = envforge(capsys, "resolve", "torch==" + "1." * 3000 + "1", "--driver", "none")
    assert code == 1 and "no such release" in err and len(err) < 600


@pytest.mark.parametrize(
    "driver", ["550", "550.54.15-0ubuntu1", "R550", "12.4", "５５０.54.15", "550." + "9" * 5000, "", "; rm -rf"]
)
def test_driver_strings(capsys: pytest.CaptureFixture[str], driver: str) -> None:
    code, _, err = envforge(capsys, "resolve", "torch", f"--driver={driver}", "--gpu", "sm_80")
    assert code == 2 and "550.54.15" in err and len(err) < 600


def test_ten_thousand_requests_and_a_very_long_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "many.txt"
    path.write_text("\n".join(f"package-{i}" for i in range(10_000)))
    code, _, err = envforge(capsys, "resolve", "-r", path, "--driver", "none")
    assert code == 2 and "10,000 requirements" in err
    path.write_text("torch" + "x" * 5_000_000)
    code, _, err = envforge(capsys, "resolve", "-r", path, "--driver", "none")
    assert code == 2 and "many.txt" in err and len(err) < 400


def test_a_host_file_of_another_tool(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lshw.json"
    path.write_text('{"id": "node", "class": "system"}')
    code, _, err = envforge(capsys, "resolve", "torch", "--host", path)
    assert code == 2 and "lshw.json is not a host file" in err
    code, _, err = envforge(capsys, "resolve", "torch", "--fleet", path)
    assert code == 2 and "lshw.json" in err


# --- outages -------------------------------------------------------------------------------------------------------

SPEC = "schema: 1\nname: own\nrequests: [torch==2.13.0, transformers==4.57.1]\n"


def test_two_outages_in_a_row_do_not_lose_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    project = tmp_path / "own"
    project.mkdir()
    (project / "image.yaml").write_text(SPEC)
    plans = []
    for _ in range(2):
        code, out, err = envforge(capsys, "resolve", project, "--driver", "none")
        assert code == 3 and "127.0.0.1:9" in err and "hint:" in err
        assert "\ntransformers==4.57.1\n" in out and "\ntorch==2.13.0+cpu\n" in out
        plans.append((project / "plan.json").read_bytes())
        assert json.loads(plans[-1])["pins"]["torch"] == "2.13.0"
    assert plans[0] == plans[1] and sorted(p.name for p in project.iterdir()) == ["image.yaml", "plan.json"]
    code, out, _ = envforge(capsys, "resolve", project, "--driver", "none", "--json")
    assert code == 3 and json.loads(out)["status"] == "ok" and json.loads(out)["lock"] is None


# --- the same bytes ------------------------------------------------------------------------------------------------


# Another hash seed, and whatever lists a folder gives its files in another order.
SHUFFLED = """
import os, random, sys
from pathlib import Path
listdir, glob = os.listdir, Path.glob
def mixed(found):
    found = list(found)
    random.Random(7).shuffle(found)
    return found
os.listdir = lambda path=".": mixed(listdir(path))
Path.glob = lambda self, pattern, **options: iter(mixed(glob(self, pattern, **options)))
"""
RUN = "import sys; from envforge.cli.app import main; main(sys.argv[1:])"


@pytest.mark.parametrize("words", [["unsloth", "torch>=2.13", "trl"], ["transformers>=5", "peft==0.17.1", "numpy"]])
def test_the_answer_depends_on_no_hash_seed_and_no_order_of_files(words: list[str], tmp_path: Path) -> None:
    outs = []
    for seed, code, order in (("1", RUN, words), ("2024", SHUFFLED + RUN, words[::-1])):
        command = [sys.executable, "-c", code, "resolve", *order, *A100, "--json"]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=env, capture_output=True, cwd=tmp_path, check=False)
        assert done.returncode in (0, 1), done.stderr
        outs.append(done.stdout)
    assert outs[0] == outs[1]


# --- addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not there")
def test_a_commit_and_a_folder_become_hashed_wheels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real git and uv; the index is a stand-in that has numpy only."""
    quiet(monkeypatch, tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    url, commit = repository(tmp_path / "repo")
    piece = source_folder(tmp_path / "piece", name="sentencepiece", version="0.2.1.dev3", requires="")
    project = tmp_path / "project"
    project.mkdir()
    (project / "image.yaml").write_text('schema: 1\nname: own\nrequests: ["numpy==1.26.4"]\n')
    words = [f"own @ {url}@{commit}", f"sentencepiece @ {piece.as_uri()}", "--driver", "none", "--python", "3.11"]
    with StandIn() as index:
        index.add("simple", "numpy", "1.26.4")
        monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
        code, out, err = envforge(capsys, "resolve", project, *words, "--json")
    assert code == 0, err
    data = json.loads(out)
    assert data["pins"]["sentencepiece"] == "0.2.1.dev3" and data["lock"]
    assert any("it is judged as 0.2.0" in w["text"] for w in data["warnings"])
    lock = (project / "requirements.txt").read_text()
    assert "own==1.5" in lock and "sentencepiece==0.2.1.dev3" in lock and lock.count("--hash=sha256:") >= 3
    assert {path.name.split("-")[0] for path in (project / "wheels").glob("*.whl")} == {"own", "sentencepiece"}


# --- check ---------------------------------------------------------------------------------------------------------


def test_check_tells_each_kind_of_host_what_runs_and_what_may_move_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    project, fleet = tmp_path / "own", tmp_path / "fleet.yaml"
    project.mkdir()
    (project / "image.yaml").write_text("schema: 1\nname: own\nrequests: [torch, transformers]\n")
    data = answer(capsys, "torch", "transformers", *A100)
    (project / "plan.json").write_text(json.dumps(data["plan"]))
    fleet.write_text(
        "- {name: old, driver: 550.54.15, gpus: [NVIDIA A100-SXM4-80GB]}\n"
        "- {name: upgraded, driver: 580.95.05, gpus: [NVIDIA A100-SXM4-80GB]}\n"
    )
    code, out, _ = envforge(capsys, "check", project, "--fleet", fleet)
    assert code == 0 and "old (driver 550.54.15): runs\nupgraded (driver 580.95.05): runs\n" in out
    assert "could have torch" in out.split("upgraded")[1] and "could" not in out.split("upgraded")[0]
    fleet.write_text("- {name: new, driver: 580.95.05, gpus: [NVIDIA B200]}\n")
    code, out, _ = envforge(capsys, "check", project, "--fleet", fleet)
    assert code == 1 and "new (driver 580.95.05): does not run" in out and "sm_100" in out
