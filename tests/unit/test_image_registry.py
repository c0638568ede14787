"""Names of images in registries, and the token flow. Stood in for: the registry and its token service, by one that
records what it is asked; tests/engine has a real one."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envforge.errors import DataError, UsageError
from envforge.image import quote
from envforge.image.engines import ImageInfo, Mount
from envforge.image.engines.podman import volume
from envforge.image.export import file_name
from envforge.image.registry import Registry, RegistryError, in_registry, is_loopback, parse_reference

HOSTILE = (
    "", " ", "-rf", "--help", "a b", "a;b", "a|b", "$(id)", "`id`", "${PATH}", "a\nb", "a:1\n", "../../etc",
    "UPPER/x:1", "a/../b",
    "host.example//x", "host.example/x:", "host.example/x:t:u", "host.example/x@sha256:12", "a'b",
    "host.example/x:-tag", "host.example:port/x", "http://host.example/x", "user@host.example/x",
    "host.example/x?y=1", 'a"b', "é/x",
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        parse_reference(text)
    with pytest.raises(DataError):
        in_registry(text or " ", f"envforge/{text}:1")


@pytest.mark.parametrize("text", ["a:1\n", "-x", "a b", "$(id)", "a\nb", ""])
def test_a_tag_is_matched_to_its_end(text: str) -> None:
    with pytest.raises(DataError):
        quote.reference(text)
    with pytest.raises(DataError):
        quote.debian_package(text)
    with pytest.raises(DataError):
        quote.env_name(text)


@pytest.mark.parametrize(
    ("text", "host", "path", "tag"),
    [
        ("python:3.11-slim", "docker.io", "library/python", "3.11-slim"),
        ("team/x", "docker.io", "team/x", "latest"),
        ("localhost/x:1", "localhost", "x", "1"),
        ("127.0.0.1:5000/team/x:1", "127.0.0.1:5000", "team/x", "1"),
        ("registry.example/a/b/c:v1", "registry.example", "a/b/c", "v1"),
    ],
)
def test_a_reference_has_a_host_a_path_and_a_tag(text: str, host: str, path: str, tag: str) -> None:
    found = parse_reference(text)
    assert (found.host, found.path, found.tag) == (host, path, tag)


def test_an_image_of_ours_keeps_its_name_in_a_registry() -> None:
    tag = "envforge/llama3:2.13.0-cu130-0123456789ab"
    assert str(in_registry("registry.example/team", tag)) == "registry.example/team/llama3:2.13.0-cu130-0123456789ab"
    assert str(in_registry("localhost:5000", tag)).startswith("localhost:5000/llama3:")
    assert str(in_registry("team", tag)).startswith("docker.io/team/llama3:")
    digest = f"sha256:{'a' * 64}"
    assert in_registry("registry.example", tag).at(digest) == f"registry.example/llama3@{digest}"


def test_only_this_machine_may_speak_plain_http() -> None:
    assert all(is_loopback(host) for host in ("localhost", "localhost:5000", "127.0.0.1:5", "[::1]:5000"))
    assert not any(is_loopback(host) for host in ("registry.example", "10.0.0.1:5000", "localhost.example:80"))
    assert Registry("registry.example").schemes == ["https"]


def test_labels_of_others_do_not_reach_the_path_of_a_file() -> None:
    labels = {"envforge.stack": "../../../etc/x;$(id)\n", "envforge.torch": "..2.0+cpu/"}
    name = file_name(ImageInfo(f"sha256:{'ab' * 32}", (), labels, 0), "sqsh")
    assert name == "_.._.._etc_x___id__-2.0+cpu_-abababababababab.sqsh"
    assert "/" not in name


def test_a_mount_whose_path_would_be_read_as_options_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="colon"):
        volume(Mount(tmp_path / "a:rw", "/x"))


class Service:
    """A registry that wants a token, and the service that gives it to a user with a password or an identity token."""

    def __init__(self, realm: str = "") -> None:
        self.asked: list[tuple[str, str, str]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def answer(self, code: int, data: object = None, **headers: str) -> None:
                body = json.dumps(data).encode()
                self.send_response(code)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                service.asked.append(("POST", self.path, body))
                self.answer(200, {"access_token": "good"})

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                login = self.headers.get("Authorization", "")
                service.asked.append((self.command, self.path, login))
                if self.path.startswith("/token"):
                    self.answer(200, {"token": "good" if login.startswith("Basic ") else "none"})
                elif login != "Bearer good":
                    denied = {"errors": [{"code": "DENIED", "message": "requested access to the resource is denied"}]}
                    place = realm or f"http://{service.host}/token"
                    self.answer(401, denied, WWW_Authenticate=f'Bearer realm="{place}",service="s",scope="pull"')
                elif "/blobs/" in self.path:
                    self.answer(200, {"config": {"Labels": {"a": "b"}}})
                else:
                    manifest = {"config": {"digest": "sha256:c"}, "layers": [{"size": 3}, {"size": 4}]}
                    self.answer(200, manifest, Docker_Content_Digest="sha256:m")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The docker configuration."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    yield tmp_path / "config.json"


def test_a_token_is_asked_for_once_with_the_users_password(config: Path) -> None:
    with Service() as service:
        word = base64.b64encode(b"me:secret").decode()
        config.write_text(json.dumps({"auths": {service.host: {"auth": word}}}))
        remote = Registry(service.host).find(parse_reference(f"{service.host}/team/x:1"))
        assert remote is not None
        assert (remote.digest, remote.config, remote.size, remote.labels) == ("sha256:m", "sha256:c", 7, {"a": "b"})
        tokens = [row for row in service.asked if row[1].startswith("/token")]
        assert tokens == [("GET", "/token?service=s&scope=pull", f"Basic {word}")]


def test_an_identity_token_is_exchanged(config: Path) -> None:
    with Service() as service:
        config.write_text(json.dumps({"auths": {service.host: {"identitytoken": "refresh me"}}}))
        assert Registry(service.host).find(parse_reference(f"{service.host}/x:1")) is not None
        body = next(row[2] for row in service.asked if row[0] == "POST")
        assert "grant_type=refresh_token" in body
        assert "refresh_token=refresh+me" in body


def test_without_credentials_the_refusal_is_the_registrys_own(config: Path) -> None:
    with Service() as service, pytest.raises(RegistryError) as error:
        Registry(service.host).find(parse_reference(f"{service.host}/team/x:1"))
    assert error.value.denied
    assert error.value.exit_code == 3
    assert "team/x" in error.value.cause
    assert "docker login" in error.value.hint


def test_a_password_goes_nowhere_in_the_clear(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Service(realm="http://elsewhere.example/token") as service:
        word = base64.b64encode(b"me:secret").decode()
        config.write_text(json.dumps({"auths": {service.host: {"auth": word}}}))
        registry = Registry(service.host)
        monkeypatch.setattr(registry.session, "get", lambda *a, **k: pytest.fail(f"asked {a}"))
        with pytest.raises(RegistryError):
            registry.find(parse_reference(f"{service.host}/x:1"))
        assert not any(word in row[2] for row in service.asked)


def test_a_credential_helper_that_is_missing_is_told(config: Path) -> None:
    with Service() as service:
        config.write_text(json.dumps({"credHelpers": {service.host: "nowhere-to-be-found"}}))
        with pytest.raises(RegistryError, match="credentials"):
            Registry(service.host).find(parse_reference(f"{service.host}/x:1"))
