"""The calls to a Kubernetes API server that jobs need, through the client of the Kubernetes project (an extra).

Answers are read as plain JSON, not as the client's model classes: those differ between its releases, and refuse fields
that a newer server sends.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from envforge.errors import OutsideError
from envforge.jobs.manifest import CONTAINER, LABEL, Manifest

SECONDS = 60  # an API server that takes longer for an answer is as good as down
_INDEX = "batch.kubernetes.io/job-completion-index"
_DOWN = "the cluster does not answer: kubectl cluster-info; the same command looks first whether the job is there"
_HINTS = {
    401: "log in to the cluster again: kubectl auth whoami tells as whom you are known",
    403: "ask for the right or the room: kubectl auth can-i create jobs; kubectl describe quota",
    404: "name a --namespace that exists; a Job needs a cluster of version 1.29 or newer",
    400: "the cluster's version may be too old for a field of the job: kubectl version",
    422: "the message above is the cluster's own: correct what it names",
}


class Api:
    """The calls that jobs need, in one namespace.

    Raises:
        OutsideError: from each call, with the server's own words; `status` holds the HTTP status where there was one.
    """

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        try:
            import yaml
            from kubernetes import client, config
            from kubernetes.config.config_exception import ConfigException
        except ImportError as error:
            raise OutsideError(
                "the kubernetes client is not installed here",
                "install envforge with its extra: pip install '.[kubernetes]'; or write the manifest with "
                "-o FILE and hand it over with kubectl apply -f FILE",
                id="no-kubernetes-client",
            ) from error
        settings = client.Configuration()
        found: Mapping[str, Any] = {}
        try:
            try:
                # Named here, because the client looks at the variable once, when it is imported.
                file = os.environ.get("KUBECONFIG") or None
                config.load_kube_config(config_file=file, context=context, client_configuration=settings)
                contexts, active = config.list_kube_config_contexts(config_file=file)
                found = next((row for row in contexts if row.get("name") == context), active) or {}
            except ConfigException as outside:
                if context:
                    raise
                try:
                    config.load_incluster_config(client_configuration=settings)
                except ConfigException:
                    raise outside from None
        except (ConfigException, yaml.YAMLError, OSError, KeyError, TypeError, ValueError) as error:
            raise OutsideError(
                f"no cluster is known here: {str(error).strip() or type(error).__name__}",
                "set KUBECONFIG, or name a context that kubectl config get-contexts lists: --context",
                id="no-cluster",
            ) from error
        self.context = context or found.get("name")
        self.namespace = namespace or (found.get("context") or {}).get("namespace") or "default"
        connection = client.ApiClient(settings)
        self._batch, self._core = client.BatchV1Api(connection), client.CoreV1Api(connection)

    def _ask(self, what: str, call: Callable[..., Any], *words: Any, **more: Any) -> bytes:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = call(*words, _preload_content=False, _request_timeout=SECONDS, **more)
            return bytes(answer.data)
        except ApiException as error:
            raise _refused(what, int(error.status or 0), error.body or error.reason or "") from error
        except (HTTPError, OSError) as error:
            raise OutsideError(f"{what}: {error}", _DOWN, id="kubernetes-down") from error

    def _json(self, *words: Any, **more: Any) -> Manifest:
        try:
            found = json.loads(self._ask(*words, **more))
        except ValueError as error:
            raise OutsideError(f"{words[0]}: the answer is no JSON", _DOWN, id="kubernetes-down") from error
        return found if isinstance(found, dict) else {}

    def create(self, item: Manifest) -> Manifest:
        """A Job or a Service; unknown fields are refused, not dropped."""
        create = self._batch.create_namespaced_job if item["kind"] == "Job" else self._core.create_namespaced_service
        what = f"Kubernetes did not take the {item['kind']}"
        return self._json(what, create, self.namespace, item, field_validation="Strict")

    def job(self, name: str) -> Manifest | None:
        """The Job, None when there is none."""
        try:
            return self._json("Kubernetes does not say which jobs there are", self._batch.read_namespaced_job,
                              name, self.namespace)  # fmt: skip
        except OutsideError as error:
            if error.id == "kubernetes-404":
                return None
            raise

    def pods(self, name: str) -> list[Manifest]:
        """Pods of a job by index, older ones of an index first."""
        found = self._json("Kubernetes does not list the pods", self._core.list_namespaced_pod, self.namespace,
                           label_selector=f"{LABEL}={name}")  # fmt: skip
        return sorted(found.get("items") or [], key=lambda pod: (index_of(pod), _started(pod), name_of(pod)))

    def events(self, names: list[str]) -> list[Manifest]:
        """What the cluster noted about these objects, oldest first."""
        found = self._json("Kubernetes does not list the events", self._core.list_namespaced_event, self.namespace)
        rows = [row for row in found.get("items") or [] if about(row).get("name") in names]
        return sorted(rows, key=lambda row: (str(row.get("lastTimestamp") or row.get("eventTime") or ""), name_of(row)))

    def log(self, pod: str) -> bytes | None:
        """A pod's log, None while it has none."""
        try:
            return self._ask("Kubernetes does not give the log", self._core.read_namespaced_pod_log, pod,
                             self.namespace, container=CONTAINER)  # fmt: skip
        except OutsideError as error:
            if error.id in ("kubernetes-400", "kubernetes-404"):  # it waits to start, or is gone
                return None
            raise

    def delete(self, name: str) -> None:
        """The Job with its pods; one that is gone already is no failure."""
        try:
            self._ask("the job was not ended", self._batch.delete_namespaced_job, name, self.namespace,
                      propagation_policy="Background")  # fmt: skip
        except OutsideError as error:
            if error.id != "kubernetes-404":
                raise


def _refused(what: str, status: int, body: str | bytes) -> OutsideError:
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
    with contextlib.suppress(ValueError, AttributeError):
        text = str(json.loads(text).get("message") or text)
    said = " ".join(text.split())[:800] or "no reason given"
    return OutsideError(f"{what}: kubernetes: {status} {said}", _HINTS.get(status, _DOWN), id=f"kubernetes-{status}")


def index_of(pod: Manifest) -> int:
    """The pod's rank."""
    word = str((pod["metadata"].get("annotations") or {}).get(_INDEX) or "0")
    return int(word) if word.isdigit() else 0


def status_of(item: Manifest) -> Mapping[str, Any]:
    """Its status, empty where it has none yet."""
    return item.get("status") or {}


def name_of(item: Manifest) -> str:
    """Its name."""
    return str(item["metadata"].get("name") or "")


def _started(pod: Manifest) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")


def about(event: Manifest) -> Mapping[str, Any]:
    """The object that an event is about."""
    return event.get("involvedObject") or event.get("regarding") or {}
