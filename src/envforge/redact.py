"""Takes secrets and the names of people and their folders out of text, so that a log or report can be sent.

What is taken out is replaced by a word in angle brackets that says what stood there; the same name always becomes the
same word, so that two lines about one user or host still belong together. Better one word too many than one too few.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

TOO_SHORT = 3  # a known name shorter than this would be found inside other words
_SYSTEM = frozenset({"root", "nobody", "daemon", "ubuntu", "slurm", "munge", "envforge", "user", "shared", "users"})
# Folder names that are also everyday words of logs: taken out of paths only.
_WORDS = frozenset(
    {"data", "train", "training", "model", "models", "cache", "work", "test", "scratch", "job", "jobs", "python",
     "python3", "conda", "default", "project", "projects", "team", "lab", "home", "admin", "torch"}
)  # fmt: skip
# A variable, option, header or JSON key whose value is a secret. Counts, limits and ids of tokens are not.
_SPECIAL = "".join(
    rf"(?<!{word}[_-])" for word in ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "per", "max", "stop")
)
_SECRET_NAME = (
    r"[\w.-]{0,64}(?:passw(?:or)?d|passphrase|secret(?![_-]?name)|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key"
    r"|key-data|certificate-data|credentials?|authorization|wandb[_-]?key|sas[_-]?key|cookie|dockerconfigjson"
    r"|(?:identity|registry|auth|access|refresh|bearer)token"
    rf"|(?<![a-z]){_SPECIAL}token|(?<![a-z])auth(?=\\?[\"']\s?:))"
)
_QUOTED = r"""\\{0,3}"(?:[^"\\\n]|\\[^"\n])*\\{0,3}"|\\{0,3}'(?:[^'\\\n]|\\[^'\n])*\\{0,3}'"""
_NO_VALUE = re.compile(r"(?i)(?:true|false|none|null|yes|no|\d{1,7}|<[\w -]+>|\*+|\$\{?\w+\}?|\(null\)|n/a)$")

# Shapes that are secrets wherever they stand. Sources: the providers' documentation of their token formats.
_SHAPES: tuple[tuple[str, str], ...] = (
    (r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]{0,20000}?-----END [A-Z ]*PRIVATE KEY-----"
     r"|[^\n]*(?:\n[^\n]{0,120}?[A-Za-z0-9+/=]{16,}[^\n]{0,20}(?=\n|\Z))*)", "private-key"),
    (r"(?<![A-Za-z0-9+/=])[A-Za-z0-9+/=]{16,}(?:\s{0,4}\n[^\n]{0,120}?[A-Za-z0-9+/=]{16,})*\s{0,4}\n[^\n]{0,120}?"
     r"-----END [A-Z ]*PRIVATE KEY-----", "private-key"),
    (r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}\b", "hub-token"),
    (r"\bms-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "hub-token"),
    (r"\b(?:A3T[A-Z0-9]|AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA)[A-Z0-9]{16}\b", "aws-key"),
    (r"\b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{30,}\b|\bgithub_pat_\w{40,}\b", "github-token"),
    (r"\bglpat-[\w-]{18,}\b|\bgldt-[\w-]{18,}\b", "gitlab-token"),
    (r"\bdckr_(?:pat|oat)_[\w-]{20,}", "registry-token"),
    (r"\bnvapi-[\w-]{20,}", "ngc-key"),
    (r"\bsk-(?:[A-Za-z]+-)*[A-Za-z0-9_-]{20,}", "api-key"),
    (r"\bxox[abposr]-[A-Za-z0-9-]{10,}", "slack-token"),
    (r"\bpypi-[\w-]{40,}", "index-token"),
    (r"\bAIza[\w-]{35}\b|\bya29\.[\w-]{20,}", "google-key"),
    (r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{5,}", "jwt"),
    (r"(?i)(?<=[?&])(?:sig|signature|x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|key-pair-id"
     r"|policy|access_token|token|awsaccesskeyid)=[^&\s\"']{6,}", "signed-url"),
)  # fmt: skip


@dataclass
class Redactor:
    """What is known to be secret or personal, and the words that stand for it.

    secrets: exact values (of secret variables). names: user and host names -> what they are (`user`, `host`).
    """

    secrets: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    _words: dict[tuple[str, str], str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """The text without what must not be sent, and without colours, which hide where words begin."""
        text = _COLOUR.sub("", text)
        for value in sorted({value for value in self.secrets if len(value) > TOO_SHORT}, key=lambda v: (-len(v), v)):
            text = self._plain(text, value)
        for shape, kind in _compiled():
            text = shape.sub(self._mark(kind), text)
        text = _BASIC.sub(self._credentials, text)
        text = _URL.sub(self._address, text)
        text = _HEADER.sub(self._keep("authorization"), text)
        text = _NETRC.sub(self._keep("secret"), text)
        text = _FLAG.sub(self._keep("secret"), text)
        text = _PAIR.sub(self._pair, text)
        text = _HOME.sub(self._home, text)
        text = _USER.sub(self._user, text)
        text = _EMAIL.sub(self._mark("mail"), text)
        for name, what in sorted(self.names.items(), key=lambda row: (-len(row[0]), row[0])):
            if len(name) >= TOO_SHORT and name.lower() not in _SYSTEM | _WORDS:
                pattern = rf"(?<![\w.-]){re.escape(name)}(?![\w-])"
                text = re.sub(pattern, lambda _: self._word(what, name), text)  # noqa: B023 - used at once
        return text

    def learn(self, text: str) -> None:
        """Take user names from home folders and from what schedulers print, to find them elsewhere too."""
        found = [match["name"] for pattern in (_HOME, _USER) for match in pattern.finditer(text)]
        self.names = {**dict.fromkeys(sorted(set(found)), "user"), **self.names}

    def _plain(self, text: str, value: str) -> str:
        import base64
        import json
        from urllib.parse import quote

        shapes = {value, json.dumps(value)[1:-1], quote(value, safe=""), base64.b64encode(value.encode()).decode()}
        for shape in sorted(shapes, key=lambda v: (-len(v), v)):
            if shape in text:
                self.counts["secret"] = self.counts.get("secret", 0) + text.count(shape)
                text = text.replace(shape, "<secret>")
        return text

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _word(self, what: str, value: str) -> str:
        self._count(what)
        numbers = [key for key in self._words if key[0] == what]
        return self._words.setdefault((what, value), f"<{what}-{len(numbers) + 1}>")

    def _mark(self, what: str) -> Callable[[re.Match[str]], str]:
        def mark(_: re.Match[str]) -> str:
            self._count(what)
            return f"<{what}>"

        return mark

    def _keep(self, what: str) -> Callable[[re.Match[str]], str]:
        """Keep the name in front of a value."""

        def keep(match: re.Match[str]) -> str:
            if _NO_VALUE.match(match["value"]):
                return match[0]
            self._count(what)
            return f"{match['head']}<{what}>"

        return keep

    def _pair(self, match: re.Match[str]) -> str:
        value = match["value"]
        inner = value.strip("\\\"'")
        if not inner or _NO_VALUE.match(inner):
            return match[0]
        self._count("secret")
        opened = re.match(r"\\*[\"']", value)
        quote = opened[0] if opened else ""
        return f"{match['head']}{quote}<secret>{quote}"

    def _credentials(self, match: re.Match[str]) -> str:
        self._count("authorization")
        return f"{match[1]} <authorization>"

    def _address(self, match: re.Match[str]) -> str:
        self._count("credentials")
        return f"{match['scheme']}<credentials>@"

    def _home(self, match: re.Match[str]) -> str:
        if match["name"].lower() in _SYSTEM:
            return match[0]
        return f"{match['head']}{self._word('user', match['name'])}"

    def _user(self, match: re.Match[str]) -> str:
        if match["name"].lower() in _SYSTEM or match["name"].startswith("<"):
            return match[0]
        return f"{match['head']}{self._word('user', match['name'])}"


_BASIC = re.compile(r"\b(Basic|Bearer|Digest|Negotiate|token)\s+(?=[^\s<]*[0-9=_.A-Z-])[A-Za-z0-9+/=_.~-]{12,}")
_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]{1,20}://)(?P<auth>[^\s/@\"'<>]{1,300}(?::[^\s/@\"'<>]*)?)@")
_HEADER = re.compile(
    r"(?im)(?P<head>\b(?:proxy-)?authorization\\?[\"']?\s?[:=]\s?\\?[\"']?(?:[A-Za-z]{1,20} )?"
    r"|\bx-(?:auth|api|registry|amz-security)[a-z-]{0,40}\s?[:=]\s?|\b(?:set-)?cookie:\s?)(?P<value>[^\s\"'<\\,;]{4,}[^\n\"'\\]*)"
)
# What netrc and enroot's credentials file hold.
_NETRC = re.compile(r"(?P<head>\bmachine\s+\S{1,200}\s+login\s+)(?P<value>\S{1,200}\s+password\s+\S+)")
# --password VALUE; never -p: it means too many other things.
_FLAG = re.compile(rf"(?i)(?P<head>(?<![\w.-])--(?:{_SECRET_NAME})[= ])(?P<value>(?!--)[^\s\"']+)")
_PAIR = re.compile(
    rf"(?i)(?P<head>(?<![\w.-])\\?[\"']?{_SECRET_NAME}\\?[\"']?\s?(?::|=>?)\s?)"
    rf"(?P<value>{_QUOTED}|[^\s\"',;&|{{}}\[\]()<]+)"
)
_HOME = re.compile(r"(?P<head>(?:/home/(?:[a-z]/)?|/Users/|/export/home/|/u/|C:\\{1,2}Users\\{1,2}))(?P<name>[\w.-]+)")
_USER = re.compile(
    r"(?P<head>\b(?:UserId|GroupId|User|USER|LOGNAME|USERNAME|uname)(?:\s?[=:]\s?[\"']?| \"))"
    r"(?P<name>[A-Za-z_][\w.-]{0,63})"
)
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[a-z]{2,24}\b")
_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_cache: list[tuple[re.Pattern[str], str]] = []


def _compiled() -> list[tuple[re.Pattern[str], str]]:
    if not _cache:
        _cache.extend((re.compile(pattern), what) for pattern, what in _SHAPES)
    return _cache


def secret_values(environment: Mapping[str, str], further: Iterable[str] = ()) -> tuple[str, ...]:
    """Values of variables whose names say that they are secret, and of those named in `further`."""
    name = re.compile(rf"(?i)^{_SECRET_NAME}$")
    named = set(further)
    return tuple(
        value
        for key, value in environment.items()
        if value and (key in named or name.match(key)) and not _NO_VALUE.match(value)
    )


def looks_secret(name: str, value: str) -> bool:
    """A variable that must not be written down: by its name, or because its value has the shape of a secret."""
    if not value or _NO_VALUE.match(value):
        return False
    if re.match(rf"(?i)^{_SECRET_NAME}$", name):
        return True
    return any(pattern.search(value) for pattern, _ in _compiled()) or bool(
        re.search(r"://[^\s/@]+:[^\s/@]+@", value) or _BASIC.search(value)
    )
