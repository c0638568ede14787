"""What is taken out of text that somebody sends: every planted secret, in every dress; and what stays readable."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envforge.diagnose.archive import make_archive, shortened
from envforge.redact import Redactor, looks_secret, secret_values

# Made up, in the shape of the real ones. Put together here so that scanners of repositories stay quiet.
HUB = "hf" + "_aBcDeFgHiJkLmNoPqRsTuVwXyZ012345"
AWS = "AKIA" + "ABCDEFGHIJKLMNOP"
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzzzz"
GITHUB = "ghp" + "_abcdefghijklmnopqrstuvwxyz0123456789"
GITLAB = "glpat" + "-abcdefghij_klmnopqrst"
MODELSCOPE = "ms" + "-0a1b2c3d-1111-2222-3333-444455556666"
NGC = "nvapi" + "-abcdefghijklmnopqrstuvwxyz"
JWT = "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4"
BASIC = base64.b64encode(b"ada:opensesame-1").decode()
PLAIN = "opensesame-1"
KEY_BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{KEY_BODY}\n{KEY_BODY[::-1]}\n-----END RSA PRIVATE KEY-----"

LINES = [
    (f"HF_TOKEN={HUB}", HUB),
    (f"login(token='{HUB}')", HUB),
    (f"https://user:{HUB}@huggingface.co/acme/a", HUB),
    (f"https://{HUB}@huggingface.co/acme/a", HUB),
    (f"AWS_ACCESS_KEY_ID={AWS}", AWS),
    (f"aws_secret_access_key = {AWS_SECRET}", AWS_SECRET),
    (f'export AWS_SECRET_ACCESS_KEY="{AWS_SECRET}"', AWS_SECRET),
    (f"remote: {GITHUB}", GITHUB),
    (f"clone with {GITLAB}", GITLAB),
    (f"modelscope login --token {MODELSCOPE}", MODELSCOPE),
    (f"docker login nvcr.io -u '$oauthtoken' --password {NGC}", NGC),
    (f"Authorization: Bearer {JWT}", JWT),
    (f"authorization: Basic {BASIC}", BASIC),
    (f"{{'Authorization': 'Bearer {PLAIN}', 'Accept': '*/*'}}", PLAIN),
    (f'-H "Authorization: Basic {BASIC}"', BASIC),
    (f"Proxy-Authorization: Basic {BASIC}", BASIC),
    (f"X-Auth-Token: {PLAIN}", PLAIN),
    (f"Set-Cookie: session={PLAIN}; Path=/", PLAIN),
    (f'{{"auths": {{"registry.example": {{"auth": "{BASIC}"}}}}}}', BASIC),
    (f'"identitytoken": "{PLAIN}"', PLAIN),
    (f"machine registry.example login ada password {PLAIN}", PLAIN),
    (f"HTTPS_PROXY=http://ada:{PLAIN}@proxy.example:3128", PLAIN),
    (f"--password {PLAIN} --lr 1", PLAIN),
    (f"--api-key={PLAIN}", PLAIN),
    (f'password: "{PLAIN}"', PLAIN),
    (f'{{\\"password\\": \\"{PLAIN}\\"}}', PLAIN),
    (f"MY_DB_PASSWD={PLAIN}", PLAIN),
    (f"wandb_api_key: {PLAIN}", PLAIN),
    (f"client-key-data: {BASIC}{BASIC}", BASIC),
    (f"url?X-Amz-Signature={'ab' * 20}&x=1", "ab" * 20),
    (KEY, KEY_BODY),
    (KEY.replace("\n", "\\n"), KEY_BODY),
    (f"{KEY_BODY}\n-----END PRIVATE KEY-----", KEY_BODY),  # its beginning was cut off
    (f"-----BEGIN PRIVATE KEY-----\n{KEY_BODY}\n", KEY_BODY),  # its end was
    ("cd /home/ada.lovelace/runs", "ada.lovelace"),
    ("C:\\Users\\lovelace\\runs", "lovelace"),
    ("   UserId=lovelace(1000) GroupId=mathgroup(1000) MCS_label=N/A", "lovelace"),
    ('User "lovelace" cannot create resource', "lovelace"),
    ("mail lovelace@example.org when done", "lovelace@example.org"),
]
DRESS = (
    "{}",
    "[rank3]: {}",
    "2026-11-02T10:00:00.123Z stderr F {}",
    "\x1b[31m{}\x1b[0m",
    "Traceback: ValueError({})",
)


@pytest.mark.parametrize(("line", "secret"), LINES, ids=range(len(LINES)))
@pytest.mark.parametrize("dress", DRESS, ids=range(len(DRESS)))
def test_planted_secret_is_gone(line: str, secret: str, dress: str) -> None:
    clean = Redactor().text(dress.replace("{}", line))
    assert secret not in clean
    assert "<" in clean


KEPT = [
    "eos_token: </s>, pad_token_id=2, max_tokens=512, tokens/s: 1234",
    "Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.",
    "RuntimeError: CUDA error: out of memory at /opt/envforge/env/lib/python3.11/site-packages/torch/cuda.py:42",
    "{'loss': 1.31, 'grad_norm': 0.4, 'learning_rate': 0.0002, 'epoch': 0.1}",
    "train_loss=1.2 secretary=none author=me authority: certificate signed by unknown authority",
    "NCCL WARN Bootstrap : no socket interface found",
    "image registry.example/train@sha256:" + "ab" * 32,
    "token=None, use_auth_token=False, password=, token: true",
    "slurmstepd: error: *** JOB 4711 ON gpu-03 CANCELLED AT 2026-11-02T03:00:12 DUE TO TIME LIMIT ***",
    "cd /root/work && ls /home/ubuntu",
    "owner: node; a retry may help",
    "git+https://github.com/acme/a@0123456789abcdef0123456789abcdef01234567",
]


@pytest.mark.parametrize("line", KEPT, ids=range(len(KEPT)))
def test_what_tells_the_cause_stays(line: str) -> None:
    assert Redactor().text(line) == line


def test_known_values_in_every_coding() -> None:
    value = 'p@ss w"rd/1'
    coded = [value, json.dumps(value), urllib.parse.quote(value, safe=""), base64.b64encode(value.encode()).decode()]
    clean = Redactor(secrets=(value,)).text(" | ".join(coded))
    assert not any(shape in clean for shape in (value, coded[2], coded[3]))
    environment = {
        "HF_TOKEN": "value-1",
        "PATH": "/bin",
        "MY_NOTE": "value-2",
        "DB_PASSWORD": "value-3",
        "TOKENIZERS_X": "1",
    }
    assert sorted(secret_values(environment, ["MY_NOTE"])) == ["value-1", "value-2", "value-3"]


def test_one_person_is_one_word_everywhere() -> None:
    redactor = Redactor()
    redactor.learn("/home/lovelace/x and /home/babbage/y")
    clean = redactor.text("4711 gpu train lovelace R; babbage waits for lovelace; lovelaces stay")
    assert (
        clean == "4711 gpu train <user-1> R; <user-2> waits for <user-1>; lovelaces stay" or clean.count("<user-") == 3
    )
    assert "lovelace " not in clean and "babbage" not in clean


def test_variables_that_must_not_be_written() -> None:
    assert looks_secret("HF_TOKEN", "abcdef") and looks_secret("X", f"see {HUB}")
    assert looks_secret("HTTPS_PROXY", f"http://ada:{PLAIN}@proxy:1")
    assert not looks_secret("MAX_TOKENS", "512") and not looks_secret("HF_TOKEN", "")
    assert not looks_secret("HTTPS_PROXY", "http://proxy:3128")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200), st.text(max_size=200))
def test_never_fails_and_is_stable(before: str, after: str) -> None:
    clean = Redactor().text(f"{before} {HUB} {after}")
    assert HUB not in clean
    assert Redactor().text(f"{before} {HUB} {after}") == clean


def test_long_lines_take_linear_time() -> None:
    """Not timed: it would not end if a pattern looked at each part of the line again."""
    for unit in ("a", "a.", "-", "--a", "token", "x=", "@", "://", "/home/", '"', "\\", "password:"):
        Redactor().text(unit * (200_000 // len(unit)))


# --- the archive ---------------------------------------------------------------------------------------------------


def unpacked(data: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        return {item.name: tar.extractfile(item).read().decode() for item in tar}  # type: ignore[union-attr]


def test_nothing_planted_survives_the_archive(tmp_path: Path) -> None:
    log = tmp_path / "4711-rank0.log"
    log.write_text("\n".join(line for line, _ in LINES) + "\ncause: out of memory\n")
    data, counts = make_archive({"accounting.txt": "UserId=lovelace(1)"}, [(log.name, log)], Redactor(secrets=(PLAIN,)))
    files = unpacked(data)
    whole = "".join(files) + "".join(files.values())
    for _, secret in LINES:
        assert secret not in whole, secret
    assert "cause: out of memory" in files["envforge-report/4711-rank0.log"]
    assert counts["hub-token"] >= 4 and "hub-token" in files["envforge-report/README.txt"]


def test_same_input_same_bytes(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("line\n")
    one, _ = make_archive({"b": "2", "a": "1"}, [("a.log", log)], Redactor())
    two, _ = make_archive({"a": "1", "b": "2"}, [("a.log", log)], Redactor())
    assert one == two


def test_large_files_keep_start_and_end(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "large.log"
    path.write_text("".join(f"line {n}\n" for n in range(200_000)))
    for source in (path, tmp_path / "large.log.gz"):
        if source != path:
            source.write_bytes(gzip.compress(path.read_bytes()))
        text = shortened(source, 100_000)
        lines = text.splitlines()
        assert len(text) < 101_000 and lines[0] == "line 0" and lines[-1] == "line 199999"
        (note,) = [line for line in lines if "left out" in line]
        kept = sum(len(line) + 1 for line in lines if line != note)
        assert int(note.split()[1]) == path.stat().st_size - kept
        assert all(line.startswith("line ") for line in lines if line != note)
