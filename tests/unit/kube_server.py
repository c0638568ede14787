"""A stand-in for a Kubernetes API server: the calls that jobs use, over HTTP on loopback, with faults to order.

It keeps what it was given, refuses a name that is taken (409) and answers as the real one does (Status objects). What a
scheduler and kubelet would do is set by the test: the status of a job, its pods, their logs, events.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml


class Cluster:
    """State of the server; `fail` maps (method, end of path) to a status and a message."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}  # kind, namespace, name
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, bytes] = {}
        self.events: list[dict[str, Any]] = []
        self.fail: dict[tuple[str, str], tuple[int, str]] = {}
        self.calls: list[str] = []
        self.drop_after: str | None = None  # the connection is cut after this kind was made
        self.url = ""

    def job(self, name: str) -> dict[str, Any]:
        return next(item for (kind, _, own), item in self.objects.items() if (kind, own) == ("jobs", name))

    def pod(self, job: str, index: int = 0, node: str = "gpu-1", **status: Any) -> str:
        """Make a pod of a job -> its name."""
        name = f"{job}-{index}-{len(self.pods):05d}"
        index_note = {"batch.kubernetes.io/job-completion-index": str(index)}
        made = f"2026-11-02T10:00:{len(self.pods):02d}Z"
        meta = {"name": name, "labels": {"envforge/job": job}, "creationTimestamp": made, "annotations": index_note}
        self.pods.append({"metadata": meta, "spec": {"nodeName": node} if node else {}, "status": status})
        return name


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, code: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(body, bytes) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            with suppress(BrokenPipeError, ConnectionResetError):  # a client that was killed
                self.end_headers()
                self.wfile.write(data)

        def _status(self, code: int, message: str) -> None:
            self._answer(
                code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
            )

        def _refused(self) -> bool:
            path = urlsplit(self.path).path
            cluster.calls.append(f"{self.command} {path}")
            for (method, end), (code, message) in cluster.fail.items():
                if method == self.command and path.endswith(end):
                    self._status(code, message)
                    return True
            return False

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._refused():
                return
            *_, namespace, kind = urlsplit(self.path).path.split("/")
            key = (kind, namespace, body["metadata"]["name"])
            if key in cluster.objects:
                self._status(409, f'{kind} "{key[2]}" already exists')
                return
            body["metadata"] |= {"uid": f"uid-{len(cluster.objects)}", "namespace": namespace}
            cluster.objects[key] = body
            if cluster.drop_after == kind:
                self.close_connection = True  # the answer never comes
                self.connection.close()
                return
            self._answer(201, body)

        def do_GET(self) -> None:
            if self._refused():
                return
            parts = urlsplit(self.path)
            words = parts.path.split("/")
            if words[-1] == "log":
                log = cluster.logs.get(words[-2])
                if log is None:
                    self._status(400, f'container "job" in pod "{words[-2]}" is waiting to start: ContainerCreating')
                else:
                    self._answer(200, log)
            elif words[-1] == "pods":
                (wanted,) = parse_qs(parts.query)["labelSelector"]
                label, _, value = wanted.partition("=")
                self._answer(
                    200, {"items": [pod for pod in cluster.pods if pod["metadata"]["labels"].get(label) == value]}
                )
            elif words[-1] == "events":
                self._answer(200, {"items": cluster.events})
            else:
                found = cluster.objects.get((words[-2], words[-3], words[-1]))
                if found is None:
                    self._status(404, f'{words[-2]} "{words[-1]}" not found')
                else:
                    self._answer(200, found)

        def do_DELETE(self) -> None:
            if self._refused():
                return
            words = urlsplit(self.path).path.split("/")
            if cluster.objects.pop((words[-2], words[-3], words[-1]), None) is None:
                self._status(404, f'{words[-2]} "{words[-1]}" not found')
                return
            cluster.pods[:] = [pod for pod in cluster.pods if pod["metadata"]["labels"]["envforge/job"] != words[-1]]
            self._answer(200, {"kind": "Status", "status": "Success"})

    return Handler


@contextmanager
def serving() -> Iterator[Cluster]:
    """A running server with an empty cluster."""
    cluster = Cluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cluster))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    cluster.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield cluster
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def kubeconfig(path: Path, url: str, **cluster: Any) -> Path:
    """A kubeconfig with one context, `here`, in the namespace `ml`."""
    data = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url, **cluster}}],
        "users": [{"name": "u", "user": {"token": "cluster-token-0123456789"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(data))
    return path
