"""Receipts beside images. Stood in for: registries that know referrers, want tokens, keep uploads elsewhere, or fail on
what they do not know; tests/engine has a real one without referrers."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from envforge.cli.app import application
from envforge.cli.run import run
from envforge.image.artifacts import INDEX, MANIFEST, attach, documents, referrers
from envforge.image.proofs import get_proof, keep_proof, known_proof, put_proof
from envforge.image.registry import Registry, RegistryError, Remote, parse_reference

RECEIPTS = Path(__file__).parent.parent / "cases" / "receipts"


class Store:
    """A registry in memory. `referrers`: whether it lists them itself. `login`: only with a token for pushing."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.referrers, self.login, self.unknown, self.upload_host = True, False, 404, ""
        self.asked: list[str] = []
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(code)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def work(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                url = urlsplit(self.path)
                store.asked.append(f"{self.command} {url.path}")
                word = self.headers.get("Authorization", "")
                if url.path == "/token":
                    if not word.startswith("Basic "):
                        return self.answer(401)
                    scope = parse_qs(url.query)["scope"][0]
                    return self.answer(200, json.dumps({"token": scope.rpartition(":")[2]}).encode())
                need = "push" if self.command in ("POST", "PUT") else "pull"
                if store.login and not (word.startswith("Bearer ") and need in word):
                    scope = f"repository:team/x:{'pull,push' if need == 'push' else 'pull'}"
                    realm = f'Bearer realm="http://{store.host}/token",service="s",scope="{scope}"'
                    return self.answer(401, WWW_Authenticate=realm)
                kind, _, name = url.path.removeprefix("/v2/team/x/").partition("/")
                if kind == "referrers":
                    return self.listed(name)
                if kind == "blobs" and self.command == "POST":
                    return self.answer(202, Location=f"{store.upload_host}/v2/team/x/blobs/uploads/1?state=a%2Fb")
                if self.command == "PUT":
                    return self.put(kind, parse_qs(url.query).get("digest", [name])[0], body)
                if kind == "blobs" and name in store.blobs:
                    return self.answer(200, store.blobs[name])
                if kind == "manifests" and name in store.manifests:
                    media, data = store.manifests[name]
                    return self.answer(200, data, Content_Type=media)
                return self.answer(404)

            def put(self, kind: str, name: str, body: bytes) -> None:
                digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
                if kind == "blobs":
                    assert name == digest
                    store.blobs[digest] = body
                    return self.answer(201)
                store.manifests[name] = (self.headers["Content-Type"], body)
                subject = (json.loads(body).get("subject") or {}).get("digest", "")
                return self.answer(201, **({"OCI_Subject": subject} if store.referrers and subject else {}))

            def listed(self, digest: str) -> None:
                if not store.referrers:
                    return self.answer(store.unknown)
                rows = [
                    {"digest": name, "artifactType": data["artifactType"], "mediaType": MANIFEST}
                    for name, (_, text) in store.manifests.items()
                    if ((data := json.loads(text)).get("subject") or {}).get("digest") == digest
                ]
                return self.answer(200, json.dumps({"manifests": rows}).encode(), Content_Type=INDEX)

            do_GET = do_HEAD = do_POST = do_PUT = work

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = Store()
    yield found
    found.server.shutdown()
    found.server.server_close()


def image_in(store: Store) -> Remote:
    where = parse_reference(f"{store.host}/team/x:1")
    labels = {"envforge.address": "ab" * 32}
    return Remote(where, "sha256:" + "1" * 64, "sha256:" + "2" * 64, labels, 1, media=MANIFEST, length=7)


RECEIPT = {"kind": "receipt", "passed": True, "grade": "full", "device": "cuda", "started": "2026-01-02T03:04:05Z"}


@pytest.mark.parametrize("kind", ["referrers", "tag", "fails-on-referrers", "token", "uploads-by-http-name"])
def test_a_receipt_is_put_once_and_read_back(store: Store, tmp_path: Path, kind: str) -> None:
    store.referrers = kind == "referrers"
    store.unknown = 500 if kind == "fails-on-referrers" else 404
    store.login = kind == "token"
    store.upload_host = f"http://{store.host}" if kind == "uploads-by-http-name" else ""
    if kind == "token":
        word = base64.b64encode(b"me:secret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {store.host: {"auth": word}}}))
    client, image = Registry(store.host), image_in(store)
    assert get_proof(client, image) is None
    first = put_proof(client, image, {**RECEIPT, "image": {"model": "/home/me/llama"}})
    assert put_proof(client, image, RECEIPT) == first and len(referrers(client, image)) == 1
    assert len([line for line in store.asked if line.startswith("PUT /v2/team/x/blobs")]) == 2, "nothing is sent twice"
    assert ("sha256-" + "1" * 64 in store.manifests) == (kind != "referrers")
    found = get_proof(Registry(store.host), image)
    assert found == {**RECEIPT, "image": {"digest": image.config, "address": "ab" * 32}}
    manifest = json.loads(store.manifests[first][1])
    assert manifest["subject"]["digest"] == image.digest and manifest["annotations"]["envforge.grade"] == "full"


def test_what_is_no_receipt_of_this_image_proves_nothing(store: Store) -> None:
    client, image = Registry(store.host), image_in(store)
    kind = "application/vnd.envforge.receipt.v1+json"
    own = {"digest": image.config, "address": "ab" * 32}
    for data in (
        b"no JSON", b"[]", b'{"passed": true, "grade": "full", "image": 7}',
        json.dumps({**RECEIPT, "image": {**own, "digest": "sha256:" + "9" * 64}}).encode(),
        json.dumps({**RECEIPT, "image": {**own, "address": ""}}).encode(),
        json.dumps({**RECEIPT, "image": own, "passed": "yes"}).encode(),
        json.dumps({**RECEIPT, "image": own, "grade": "best"}).encode(),
    ):  # fmt: skip
        attach(client, image, kind, "receipt.json", data)
    good = put_proof(client, image, {**RECEIPT, "grade": "static"})
    assert len(documents(client, image, kind)) == 8
    found = get_proof(client, image)
    assert found is not None and found["grade"] == "static"
    # A blob that is not what its digest says.
    blob = json.loads(store.manifests[good][1])["layers"][0]["digest"]
    store.blobs[blob] = store.blobs[blob].replace(b"static", b"full..")
    assert get_proof(client, image) is None
    # Lists that no registry should give.
    for index in (b"[]", b'{"manifests": 7}', b'{"manifests": [7, {"artifactType": "%s"}]}' % kind.encode()):
        store.referrers = False
        store.manifests["sha256-" + "1" * 64] = (INDEX, index)
        assert get_proof(client, image) is None


def test_a_refusal_is_the_registrys_own_and_no_receipt_leaves_in_the_clear(store: Store) -> None:
    client, image = Registry(store.host), image_in(store)
    store.login = True
    with pytest.raises(RegistryError) as error:
        put_proof(client, image, RECEIPT)
    assert error.value.denied
    store.login, store.upload_host = False, "http://elsewhere.example"
    with pytest.raises(RegistryError, match="without TLS"):
        put_proof(client, image, RECEIPT)


def test_a_receipt_that_a_job_earned_is_put_beside_its_image(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"config": {"Labels": {"envforge.address": "ab" * 32}}}).encode()
    digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    store.blobs[digest] = config
    manifest = json.dumps({"config": {"digest": digest}, "layers": [{"size": 3}]}).encode()
    reference = f"{store.host}/team/x:1"
    store.manifests["1"] = (MANIFEST, manifest)
    by_digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    file = tmp_path / "receipt-gpu-5.json"

    def attached(**fields: Any) -> tuple[int, str]:
        recorded = json.loads((RECEIPTS / "no-torch.json").read_text())
        file.write_text(json.dumps({**recorded, "passed": True, "grade": "full", "first_failure": None, **fields}))
        code = run(application(), ["images", "attach", reference, str(file)])
        told = capsys.readouterr()
        return code, told.out + told.err

    code, told = attached(image_digest="sha256:" + "9" * 64)
    assert code == 1 and "9999, and " + reference in told, told
    assert "without a digest" in attached(image_digest=None)[1]
    assert "did not pass" in attached(image_digest=digest, passed=False)[1]
    assert not [name for name in store.manifests if name.startswith("sha256")], "nothing was pushed"
    for proven in (digest, by_digest):  # what a job knows of its image may be either
        code, told = attached(image_digest=proven)
        assert code == 0 and f"team/x@{by_digest}" in told, told
    client = Registry(store.host)
    remote = client.find(parse_reference(reference))
    assert remote is not None
    found = get_proof(client, remote)
    assert found is not None and found["grade"] == "full" and found["host"]["os"] == "debian12"
    del store.manifests["1"]
    assert attached(image_digest=digest)[0] == 3


def test_a_fetched_receipt_is_kept_with_whose_word_it_is(store: Store) -> None:
    from envforge.image.engines import ImageInfo

    image = image_in(store)
    info = ImageInfo(image.config, (), image.labels, 1)
    assert known_proof(info) is None and known_proof(info, "python:3.11") is None
    found: dict[str, Any] = {**RECEIPT, "image": {"digest": image.config, "address": "ab" * 32}}
    path = keep_proof(found, "ab" * 32, "registry.example")
    assert (known_proof(info) or ({}, ""))[1] == "registry.example"
    keep_proof({**found, "device": "cpu"}, "ab" * 32, "other.example")
    assert json.loads(path.read_text())["device"] == "cuda", "what is there stays"
    assert known_proof(ImageInfo("sha256:" + "9" * 64, (), image.labels, 1)) is None, "other bytes of the same plan"
