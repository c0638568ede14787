"""A job on a Kubernetes cluster: created once, asked what became of it, its logs fetched, ended.

The calls themselves are in `kubeapi`; this is what they mean for a job.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from envforge.errors import DataError, OutsideError, UsageError
from envforge.files import write_atomic
from envforge.jobs.follow import JobState
from envforge.jobs.kubeapi import Api, about, index_of, name_of, status_of
from envforge.jobs.manifest import CONTAINER, KEY, RECEIPT_BEGIN, RECEIPT_END, Manifest, dump, job_name
from envforge.jobs.model import PREFLIGHT_EXIT, JobSpec
from envforge.jobs.record import Record, keep_plan, made_folder, new_record, read_record, submitted, write_record

SCRIPT = "job.yaml"
# --- once, and only once -------------------------------------------------------------------------------------------


def submit(spec: JobSpec, objects: list[Manifest], context: str | None = None) -> tuple[Record, bool]:
    """Hand a job to the cluster once: -> the record, and whether this call did it.

    The name holds the job's key, and the cluster takes a name once: a second call, also after a client that was killed
    before it heard the answer, finds the job that is there.

    Raises:
        OutsideError: no client, no cluster, no answer, or a refusal, with the cluster's words. UsageError: another job
        has this folder or this name.
    """
    from filelock import FileLock

    folder = made_folder(spec.output)
    with FileLock(folder / ".lock"):
        before = read_record(folder)
        key = spec.key()
        if before is not None and before.key in spec.known_keys() and before.state == "submitted":
            return before, False
        if before is not None and before.key != key and before.job_id and not status(before).ended:
            raise UsageError(
                f"another job named {spec.name} ({before.job_id}) is still under way in {folder}",
                f"give this one another --name, or end that: envforge job cancel {folder}",
            )
        api = Api(context, spec.namespace)
        record = new_record(
            spec, "kubernetes", script=SCRIPT, log="%j-rank*.log", receipt="receipt-*.json" if spec.verify else None,
            extra={"namespace": api.namespace, "context": api.context},
        )  # fmt: skip
        write_atomic(folder / SCRIPT, dump(objects))
        keep_plan(spec)
        write_record(replace(record, state="submitting"))
        name = job_name(spec)
        try:
            job, new = _create(api, objects, name, key)
        except OutsideError as error:
            if error.id not in ("kubernetes-down", "kubernetes-0"):
                write_record(replace(record, state="written"))
            raise
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"].get("uid", "")}
        for item in objects:
            if item["kind"] != "Job":
                # The job owns it: they go together. It may be there already from a call that was cut off.
                with _there_already():
                    api.create({**item, "metadata": {**item["metadata"], "ownerReferences": [owner]}})
        record = submitted(record, name)
        write_record(record)
    return record, new


def _create(api: Api, objects: list[Manifest], name: str, key: str) -> tuple[Manifest, bool]:
    job = next(item for item in objects if item["kind"] == "Job")
    try:
        return api.create(job), True
    except OutsideError as error:
        if error.id != "kubernetes-409":
            raise
        found = api.job(name)
        if found is None or found["metadata"].get("deletionTimestamp"):
            raise OutsideError(
                f"the job {name} is just being deleted", "try again in a minute, or --again 1", id="being-deleted"
            ) from error
        if (found["metadata"].get("annotations") or {}).get(KEY) != key:
            raise UsageError(
                f"a job named {name} is there and is another one", "give this one another --name"
            ) from error
        return found, False


@contextlib.contextmanager
def _there_already() -> Iterator[None]:
    try:
        yield
    except OutsideError as error:
        if error.id != "kubernetes-409":
            raise


# --- what became of it ---------------------------------------------------------------------------------------------


def _api(record: Record) -> Api:
    return Api(record.extra.get("context"), record.extra.get("namespace"))


def status(record: Record) -> JobState:
    """What the cluster says of a job.

    Raises:
        OutsideError: it does not answer.
    """
    name = record.job_id or ""
    if not name:
        return JobState("", "lost", reason="it was never submitted")
    api = _api(record)
    job = api.job(name)
    if job is None:
        kept = (read_record(Path(record.output)) if record.output else None) or record
        if kept.extra.get("cancelled"):
            return JobState(name, "cancelled", "Cancelled", "it was ended and deleted")
        return JobState(name, "lost", reason="the cluster has no job of that name; logs that were fetched are kept")
    pods = api.pods(name)
    conditions = {row["type"]: row for row in status_of(job).get("conditions") or [] if row.get("status") == "True"}
    codes = [code for pod in pods if (code := exit_code(pod)) is not None]
    _keep_refusals(record, pods)
    nodes = ",".join(sorted({node for pod in pods if (node := (pod.get("spec") or {}).get("nodeName"))}))
    restarts = int(status_of(job).get("failed") or 0)
    if "Complete" in conditions:
        return JobState(name, "done", "Complete", "", 0, nodes, restarts)
    for kind in ("Failed", "FailureTarget"):
        if kind in conditions:
            word = str(conditions[kind].get("reason") or kind)
            state = "timeout" if word == "DeadlineExceeded" else "failed"
            code = PREFLIGHT_EXIT if PREFLIGHT_EXIT in codes else max(codes, default=None)
            return JobState(name, state, word, _why(pods) or str(conditions[kind].get("message") or ""), code,
                            nodes, restarts)  # fmt: skip
    if "Suspended" in conditions or (job.get("spec") or {}).get("suspend"):
        return JobState(name, "waiting", "Suspended", "it waits in its queue", None, nodes, restarts)
    phases = {status_of(pod).get("phase") for pod in pods}
    if "Running" in phases:
        return JobState(name, "running", "Running", "", None, nodes, restarts)
    reason = _why(pods) or ("no pod was made yet" if not pods else "")
    return JobState(name, "waiting", "Pending", reason, None, nodes, restarts)


def _keep_refusals(record: Record, pods: list[Manifest]) -> None:
    """What the preflight said on nodes that it refused: the pods hold it, and the job's folder keeps it."""
    if not record.output or not Path(record.output).is_dir():
        return
    for pod in pods:
        for row in status_of(pod).get("containerStatuses") or []:
            said = str(((row.get("state") or {}).get("terminated") or {}).get("message") or "")
            found = re.search(r"preflight (\S+): refused: (.+?)\. fix: (.+)", said)
            if found and exit_code(pod) == PREFLIGHT_EXIT:
                node = re.sub(r"[^\w.-]", "_", found[1])[:100]
                cause = {"id": "refused", "text": found[2], "fix": found[3].partition("; warning: ")[0]}
                answer: Manifest = {"schema": 1, "node": found[1], "ok": False, "cause": cause, "warnings": []}
                path = Path(record.output) / f"preflight-{record.job_id}-{node}.json"
                write_atomic(path, json.dumps(answer) + "\n")


def cancel(record: Record) -> None:
    """End the job; what its pods said and what the cluster noted is fetched before they are gone.

    Raises:
        OutsideError: the cluster does not answer, or it is not ours to end.
    """
    if not record.job_id:
        return
    api = _api(record)
    if record.output:
        with contextlib.suppress(OutsideError):
            log_files(record)
            write_atomic(Path(record.output) / f"{record.job_id}.status.txt", accounting(record))
    api.delete(record.job_id)
    if record.output:
        write_record(replace(record, extra={**record.extra, "cancelled": True}))


def log_files(record: Record) -> list[Path]:
    """The logs of the pods by rank, fetched into the job's folder; of a proof, its receipts too."""
    name, folder = record.job_id or "", Path(record.output or f"envforge-jobs/{record.name}")
    if not name:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    api = _api(record)
    pods = api.pods(name)
    for number, pod in enumerate(pods):
        last = number + 1 == len(pods) or index_of(pods[number + 1]) != index_of(pod)
        start = "" if last else f"-{name_of(pod)[-5:]}"
        path = folder / f"{name}{start}-rank{index_of(pod)}.log"
        data = api.log(name_of(pod))
        if data is not None:
            write_atomic(path, data)
            if record.verify:
                _keep_receipt(folder, data, (pod.get("spec") or {}).get("nodeName") or f"rank{index_of(pod)}")
    found = folder.glob(f"{name}*-rank*.log")
    return sorted(found, key=lambda path: (int(path.stem.rpartition("rank")[2] or 0), path.name))


def _keep_receipt(folder: Path, log: bytes, node: str) -> None:
    body = log.rpartition(f"\n{RECEIPT_BEGIN}\n".encode())[2].partition(f"\n{RECEIPT_END}".encode())
    with contextlib.suppress(ValueError):
        if body[1]:
            json.loads(body[0])
            write_atomic(folder / f"receipt-{node}.json", body[0] + b"\n")


def accounting(record: Record) -> str:
    """What the cluster knows of a job as lines of text, for people and for diagnose.

    Raises:
        OutsideError: it does not answer. DataError: the record names no job.
    """
    name = record.job_id
    if not name:
        raise DataError(f"the record of {record.name} names no job", "it was never submitted")
    api = _api(record)
    job, pods = api.job(name), api.pods(name)
    lines = []
    if job is None:
        kept = Path(record.output) / f"{name}.status.txt"
        if record.output and kept.is_file():
            return kept.read_text(encoding="utf-8")
        lines.append(f"job {name}: not in the cluster")
    else:
        counts = ", ".join(f"{status_of(job).get(word) or 0} {word}" for word in ("active", "succeeded", "failed"))
        lines.append(f"job {name}: {counts}")
        lines += _conditions("job", name, job)
    for pod in pods:
        state, spec = status_of(pod), pod.get("spec") or {}
        on = f" on {spec['nodeName']}" if spec.get("nodeName") else ""
        why = f", reason {state['reason']}" if state.get("reason") else ""
        said = f": {_flat(state.get('message'))}" if state.get("message") else ""
        lines.append(f"pod {name_of(pod)} (rank {index_of(pod)}): phase {state.get('phase')}{on}{why}{said}")
        lines += _conditions("pod", name_of(pod), pod)
        lines += [f"  {line}" for line in _containers(pod)]
    for row in api.events([name, *(name_of(pod) for pod in pods)]):
        item, said = about(row), _flat(row.get("message") or row.get("note"))
        lines.append(f"event {row.get('type')} {row.get('reason')} {item.get('kind')}/{item.get('name')}: {said}")
    return "\n".join(lines) + "\n"


def _conditions(kind: str, name: str, item: Manifest) -> list[str]:
    """Conditions that say something: of a job the true ones, of a pod a refusal to schedule and a disruption."""
    lines = []
    for row in status_of(item).get("conditions") or []:
        waits = row.get("type") == "PodScheduled" and row.get("status") == "False"
        if waits or (row.get("status") == "True" and (kind == "job" or row.get("type") == "DisruptionTarget")):
            said = f", reason {row['reason']}" if row.get("reason") else ""
            told = f": {_flat(row['message'])}" if row.get("message") else ""
            lines.append(f"{kind} {name}: condition {row.get('type')}{' is False' if waits else ''}{said}{told}")
    return lines


def _containers(pod: Manifest) -> list[str]:
    lines = []
    for row in [*(status_of(pod).get("initContainerStatuses") or []), *(status_of(pod).get("containerStatuses") or [])]:
        for kind, state in sorted((row.get("state") or {}).items()):
            reason = f", reason {state['reason']}" if state.get("reason") not in (None, "Error", "Completed") else ""
            code = f", exit code {state['exitCode']}" if "exitCode" in state else ""
            said = f": {_flat(state['message'])}" if state.get("message") else ""
            lines.append(f"container {row.get('name')}: {kind}{reason}{code}{said}")
    return lines


def _why(pods: list[Manifest]) -> str:
    """The first thing that a pod says of why it does not run, or did not."""
    for pod in sorted(pods, key=lambda pod: exit_code(pod) != PREFLIGHT_EXIT):
        for row in status_of(pod).get("containerStatuses") or []:
            state = row.get("state") or {}
            ended, waits = state.get("terminated") or {}, state.get("waiting") or {}
            if ended.get("exitCode") == PREFLIGHT_EXIT and ended.get("message"):
                return _flat(str(ended["message"]).strip().splitlines()[-1])
            if waits.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return f"{waits['reason']}: {_flat(waits.get('message'))}"
            if ended.get("reason") not in (None, "Completed", "Error"):
                return f"{ended['reason']} on {(pod.get('spec') or {}).get('nodeName')}"
        for row in status_of(pod).get("conditions") or []:
            if row.get("type") == "PodScheduled" and row.get("status") == "False":
                return f"{row.get('reason')}: {_flat(row.get('message'))}"
    return ""


def exit_code(pod: Manifest) -> int | None:
    """Of the job's container, None while it runs."""
    for row in status_of(pod).get("containerStatuses") or []:
        ended = (row.get("state") or {}).get("terminated")
        if row.get("name") == CONTAINER and isinstance(ended, dict):
            return int(ended.get("exitCode") or 0)
    return None


def _flat(text: object) -> str:
    return " ".join(str(text or "").split())[:1000]
