"""What every use of the docker SDK shares: its images as ours, and its failures as ours."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envforge.errors import EngineError
from envforge.image.engines import ImageInfo
from envforge.image.failures import explain

_SPACE = re.compile(r"no space left on device|disk quota exceeded", re.I)


def info(image: Any) -> ImageInfo:
    size, created = int(image.attrs.get("Size") or 0), str(image.attrs.get("Created") or "")
    return ImageInfo(str(image.id), tuple(image.tags), dict(image.labels or {}), size, created)


def where() -> str:
    host = os.environ.get("DOCKER_HOST")
    return f" at {re.sub(r'(?<=://)[^/@]*@', '', host)}" if host else ""


def short(error: BaseException) -> str:
    text = str(getattr(error, "explanation", None) or error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__


@contextlib.contextmanager
def told(log: Path | None = None, tail: deque[str] | None = None) -> Iterator[None]:
    """Whatever the SDK raises becomes an error of ours."""
    import requests
    from docker.errors import APIError, DockerException

    try:
        yield
    except APIError as error:
        if _SPACE.search(str(error)):
            raise explain([str(error)], log) from error
        raise EngineError(f"the docker engine refused: {short(error)}", id="engine-refused") from error
    except (requests.RequestException, DockerException, ConnectionError) as error:
        raise EngineError(
            f"the docker engine{where()} went away: {short(error)}", "start it and run again", id="engine-died"
        ) from error
