"""Looking into a registry: is this image there, what are its digest and labels, which tags are there.

The distribution protocol over `requests`, with the credentials that the docker configuration names. Own code because
the libraries for it do not fit: python-dxf refuses passwords for a registry on loopback and hides the registry's own
words, oras knows neither credential helpers nor HEAD. Pushing and pulling is the engines' work.

Protocol: https://github.com/opencontainers/distribution-spec/blob/main/spec.md and, for the tokens,
https://distribution.github.io/distribution/spec/auth/token/
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envforge.errors import DataError, OutsideError

if TYPE_CHECKING:
    import requests

HUB = "docker.io"
_HUB_API = "registry-1.docker.io"
_CERTS = Path("/etc/docker/certs.d")
_MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.manifest.v1",
        "docker.distribution.manifest.v2",
        "oci.image.index.v1",
        "docker.distribution.manifest.list.v2",
    )
)
_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*(:\d+)?|\[[0-9a-fA-F:]+\](:\d+)?)/"
    r"(?P<path>[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_CHALLENGE = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_DENIED = re.compile(r"denied|unauthori[sz]ed|authentication required|no basic auth|forbidden", re.I)
_LIMIT = 8 * 2**20  # a manifest or configuration is a few kB; more is no answer
TIMEOUT = (10.0, 60.0)


@dataclass(frozen=True, slots=True)
class Reference:
    """A place in a registry: host with port, path, and a tag or a digest."""

    host: str
    path: str
    tag: str = "latest"
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.host}/{self.path}" + (f"@{self.digest}" if self.digest else f":{self.tag}")

    def at(self, digest: str) -> str:
        """The same image by its content: what a cluster should be told."""
        return f"{self.host}/{self.path}@{digest}"


@dataclass(frozen=True, slots=True)
class Remote:
    """An image in a registry.

    digest: of its manifest, what `@sha256:...` names. config: of its configuration, which is docker's image id.
    size: bytes of its layers, compressed. created: ISO, where the configuration says. media, length: kind and bytes of
    the manifest.
    """

    reference: Reference
    digest: str
    config: str
    labels: dict[str, str]
    size: int
    created: str = ""
    media: str = ""
    length: int = 0


class RegistryError(OutsideError):
    """The registry did not answer, or said no; `denied`: it wants other credentials, or more rights."""

    id = "registry"

    def __init__(self, cause: str, hint: str = "", *, denied: bool = False) -> None:
        super().__init__(cause, hint)
        self.denied = denied


def refusal(reference: str, what: str, said: str) -> RegistryError:
    """The error for a push or pull that failed, from the engine's words, which hold the registry's."""
    host = parse_reference(reference).host
    return RegistryError(
        f"{reference} {what}: {said.strip()[:400]}",
        f"check the name and the network, and log in with: docker login {host}",
        denied=_DENIED.search(said) is not None,
    )


def parse_reference(text: str) -> Reference:
    """`registry.example/team/name:tag` or `...@sha256:...`; a name without a host is one of Docker Hub.

    Raises:
        DataError: not a reference.
    """
    first, slash, _ = text.partition("/")
    whole = text
    if not slash or not _names_host(first):
        whole = f"{HUB}/{text if slash else 'library/' + text}"
    match = _REFERENCE.fullmatch(whole)
    if match is None:
        raise DataError(f"{text[:200]!r} is not an image reference", "give it as registry.example/team/name:tag")
    return Reference(match["host"], match["path"], match["tag"] or "latest", match["digest"])


def in_registry(registry: str, tag: str) -> Reference:
    """Where an image of ours stands in a registry: `envforge/STACK:TORCH-VARIANT-HASH` below the registry's path.

    Raises:
        DataError: `registry` is not one.
    """
    place = registry.rstrip("/")
    if not _names_host(place.split("/")[0]):
        place = f"{HUB}/{place}"
    return parse_reference(f"{place}/{tag.removeprefix('envforge/')}")


def _names_host(first: str) -> bool:
    """Is the first part of a name a host, as docker tells it?"""
    return "." in first or ":" in first or first == "localhost"


def is_loopback(host: str) -> bool:
    """Does the name mean this machine? Registries there may speak plain HTTP, as for docker itself."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


class Registry:
    """One registry host. Holds a session and the tokens that it gave."""

    def __init__(self, host: str) -> None:
        import requests

        self.host = host
        self.session = requests.Session()
        self.session.headers["User-Agent"] = "envforge"
        own = _CERTS / host / "ca.crt"  # where docker looks too
        if own.is_file():
            self.session.verify = str(own)
        self.schemes = ["https", "http"] if is_loopback(host) else ["https"]
        self._tokens: dict[str, str] = {}

    def find(self, reference: Reference) -> Remote | None:
        """The image, None where there is none. One HEAD; more is only asked of what is there.

        Raises:
            RegistryError: no answer, or a refusal, in the registry's own words.
        """
        name = reference.digest or reference.tag
        head = self.ask("HEAD", reference, f"manifests/{name}")
        if head is None:
            return None
        answer = self.ask("GET", reference, f"manifests/{name}")
        if answer is None:
            return None
        manifest = _json(answer, reference)
        digest = answer.headers.get("Docker-Content-Digest") or digest_of(answer.content)
        media = answer.headers.get("Content-Type", "").partition(";")[0]
        if "manifests" in manifest:
            # One image for several architectures, as buildx makes them; ours are the same plan on one architecture.
            rows = [row for row in manifest["manifests"] if (row.get("platform") or {}).get("os") != "unknown"]
            if not rows:
                return None
            inner = self.ask("GET", reference, f"manifests/{rows[0]['digest']}")
            if inner is None:
                return None
            manifest = _json(inner, reference)
        try:
            config = str(manifest["config"]["digest"])
            size = sum(int(layer["size"]) for layer in manifest["layers"])
        except (KeyError, TypeError, ValueError) as error:
            raise RegistryError(f"{reference}: the registry's manifest is of an unknown kind") from error
        blob = self.ask("GET", reference, f"blobs/{config}")
        if blob is None:
            return None
        data = _json(blob, reference)
        labels = {str(k): str(v) for k, v in ((data.get("config") or {}).get("Labels") or {}).items()}
        return Remote(reference, digest, config, labels, size, str(data.get("created") or ""), media,
                      len(answer.content))  # fmt: skip

    def tags(self, reference: Reference) -> tuple[str, ...]:
        """All tags of the reference's repository; empty where there is none.

        Raises:
            RegistryError: no answer, or a refusal.
        """
        found: list[str] = []
        path: str | None = "tags/list?n=1000"
        while path:
            answer = self.ask("GET", reference, path)
            if answer is None:
                break
            found += [str(tag) for tag in _json(answer, reference).get("tags") or ()]
            following = answer.links.get("next", {}).get("url", "")
            path = f"tags/list?{following.partition('?')[2]}" if "?" in following else None
        return tuple(found)

    def ask(
        self, method: str, reference: Reference, path: str, *, data: bytes | None = None, kind: str = ""
    ) -> requests.Response | None:
        """The answer, None for 'not there'.

        Args:
            path: below the reference's repository, or where the registry itself pointed to (an address, or a path that
                begins with a slash). data, kind: what is sent, and its media type.

        Raises:
            RegistryError: no answer, or a refusal, in the registry's own words.
        """
        from urllib.parse import urljoin, urlsplit

        import requests

        api = _HUB_API if self.host == HUB else self.host
        failure: Exception | None = None
        there = urlsplit(path)
        if there.netloc == api:  # behind a proxy, registries name themselves by http
            path = there._replace(scheme="", netloc="").geturl()
        elif there.scheme == "http" and not is_loopback(there.netloc):
            raise RegistryError(f"the registry {self.host} points to {there.netloc} without TLS")
        for scheme in list(self.schemes):
            url = urljoin(f"{scheme}://{api}/v2/{reference.path}/", path)
            try:
                answer = self._send(method, url, reference, data, kind)
            except requests.RequestException as error:
                failure = failure or error
                continue
            self.schemes = [scheme]
            if answer.status_code == 404:
                return None
            if answer.status_code in (401, 403):
                raise RegistryError(
                    f"the registry {self.host} refused {reference.path}: {_words(answer)}",
                    f"log in with: docker login {self.host}; the user needs rights on {reference.path}",
                    denied=True,
                )
            if not answer.ok:
                raise RegistryError(f"the registry {self.host} failed on {reference.path}: {_words(answer)}")
            return answer
        raise RegistryError(
            f"the registry {self.host} does not answer: {_reason(failure)}",
            f"check its name and the network; a certificate of your own belongs in {_CERTS}/{self.host}/ca.crt",
        )

    def _send(
        self, method: str, url: str, reference: Reference, data: bytes | None = None, kind: str = ""
    ) -> requests.Response:
        from urllib.parse import urlsplit

        headers = {"Accept": _MANIFESTS, **({"Content-Type": kind} if kind else {})}
        scope = f"repository:{reference.path}:pull" + ("" if data is None else ",push")
        # Where a registry keeps blobs elsewhere, the address that it gave is all that is needed there.
        own = urlsplit(url).netloc == (_HUB_API if self.host == HUB else self.host)
        if own and scope in self._tokens:
            headers["Authorization"] = self._tokens[scope]
        answer = self.session.request(method, url, headers=headers, data=data, timeout=TIMEOUT)
        if answer.status_code != 401 or not own:
            return answer
        challenge = answer.headers.get("WWW-Authenticate", "")
        authorization = self._authorize(challenge, scope)
        if authorization is None:
            return answer
        self._tokens[scope] = authorization
        headers["Authorization"] = authorization
        return self.session.request(method, url, headers=headers, data=data, timeout=TIMEOUT)

    def _authorize(self, challenge: str, scope: str) -> str | None:
        """The Authorization header that answers a challenge; None where there are no credentials for it."""
        import base64

        user, password, identity = credentials(self.host)
        kind = challenge.split(" ", 1)[0].lower()
        if kind == "basic":
            if user is None:
                return None
            return "Basic " + base64.b64encode(f"{user}:{password or ''}".encode()).decode()
        if kind != "bearer":
            return None
        fields = dict(_CHALLENGE.findall(challenge))
        realm = fields.get("realm", "")
        # A password goes nowhere in the clear, whatever a registry asks for.
        if not realm.startswith("https://") and not is_loopback(re.sub(r"^http://([^/]*).*", r"\1", realm)):
            return None
        asked = {"service": fields.get("service", ""), "scope": fields.get("scope") or scope}
        if identity is not None:
            form = {"grant_type": "refresh_token", "refresh_token": identity, "client_id": "envforge", **asked}
            answer = self.session.post(realm, data=form, timeout=TIMEOUT)
        else:
            login = (user, password or "") if user is not None else None
            answer = self.session.get(realm, params=asked, auth=login, timeout=TIMEOUT)
        if not answer.ok:
            return None
        try:
            body = answer.json()
            token = body.get("access_token") or body.get("token")
        except (ValueError, AttributeError):
            return None
        return f"Bearer {token}" if token else None


def credentials(host: str) -> tuple[str | None, str | None, str | None]:
    """User, password, identity token for a registry from the docker configuration (auths, credHelpers, credsStore).

    Raises:
        RegistryError: the credential helper that the configuration names failed.
    """
    import warnings

    from docker import auth
    from docker.errors import DockerException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a missing helper is told below
            found: dict[str, Any] = auth.load_config().resolve_authconfig(host) or {}
    except (DockerException, OSError, ValueError) as error:
        raise RegistryError(
            f"the credentials for {host} could not be read: {error}",
            "look at the docker configuration (config.json: auths, credHelpers, credsStore)",
        ) from error
    lower = {key.lower(): value for key, value in found.items()}
    return lower.get("username"), lower.get("password"), lower.get("identitytoken")


def _json(answer: requests.Response, reference: Reference) -> dict[str, Any]:
    try:
        if len(answer.content) > _LIMIT:
            raise ValueError("too long")
        data = answer.json()
    except ValueError as error:
        raise RegistryError(f"{reference}: what answers there is no registry ({error})") from error
    if not isinstance(data, dict):
        raise RegistryError(f"{reference}: what answers there is no registry")
    return data


def digest_of(data: bytes) -> str:
    """What a registry calls these bytes."""
    import hashlib

    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _words(answer: requests.Response) -> str:
    """What the registry itself says, in one line."""
    try:
        rows = answer.json()["errors"]
        said = "; ".join(str(row.get("message") or row.get("code")) for row in rows)
    except (ValueError, KeyError, TypeError, AttributeError):
        said = ""
    return f"{said[:300]} (HTTP {answer.status_code})" if said else f"HTTP {answer.status_code} {answer.reason}"


def _reason(failure: Exception | None) -> str:
    """The last cause of a chain of connection errors, without the objects that Python prints around it."""
    text = str(failure)
    found = re.findall(r"\[Errno -?\d+\] ([^'\")\]]+)|certificate verify failed: ([^(]+)|(timed out)", text)
    return next((word for words in reversed(found) for word in words if word), text)[:200].strip()
