"""Looks at this node for some milliseconds before a command runs in the image: one line, one cause, exit code 86.

The standard library only, and of it what loads quickly. The entrypoint runs it before a command, jobs once per node.

  preflight.py [--json] [--quiet] [--write FILE] [--recorded DIR] [--facts FILE] [--gpus N] [--nodes N] [--own]
               [--address HASH]

--quiet: not a word on a node where all is well. --write keeps the JSON in a file ({node} in its name is the node's).
--own: the GPUs were given to this job alone, so memory that others hold refuses the node. --address: content address
of the image that the job was made for. --recorded: a folder as `envforge detect --record` writes it, instead of this
machine ({node} likewise); shm_mib, disk_mib, memlock_kib and rdma in it, one number each, stand for those.
Variables: ENVFORGE_PREFLIGHT=off|done|warn, ENVFORGE_RECORDED, ENVFORGE_PREFLIGHT_SECONDS (how long the driver may
take, 20), ENVFORGE_MIN_FREE_MIB, ENVFORGE_IMAGE_DIGEST.
"""

from __future__ import annotations

import json
import os
import sys
import time

TYPE_CHECKING = False  # importing typing itself would take longer than the checks
if TYPE_CHECKING:
    from typing import Any

REFUSED = 86
MIB = 1 << 20
ENOUGH_SHM = 1024  # MiB. Docker gives 64; workers of a data loader and NCCL's shared segments need more
OTHERS = 1024  # MiB that may be held by others on a GPU that was given to a job alone: display, MPS, persistence
LITTLE_DISK, NO_DISK = 5120, 16  # MiB, where caches and temporary files go; a read-only container has 64 in /dev/shm
UNLIMITED = -1
DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


class Refuse(Exception):
    """The cause: an id, what is wrong, and what to do about it."""

    def __init__(self, id: str, text: str, fix: str) -> None:
        super().__init__(text)
        self.id, self.text, self.fix = id, text, fix

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "text": self.text, "fix": self.fix}


def numbers(version: str) -> tuple[int, ...]:
    """Dotted numbers; what is no number ends them."""
    found = []
    for part in version.split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


# --- what the node says ------------------------------------------------------------------------------------------


def ask_nvml(library: Any = None) -> dict[str, Any]:
    """NVML's answer in the shape of a record's nvml.json. Function and error numbers: NVIDIA's nvml.h."""
    import ctypes
    from ctypes import byref, c_char, c_int, c_uint, c_ulonglong, c_void_p

    class Memory(ctypes.Structure):
        _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]

    class Process(ctypes.Structure):
        _fields_ = [("pid", c_uint), ("used", c_ulonglong), ("instance", c_uint), ("compute", c_uint)]

    try:
        nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return {"error": str(error), "code": 12, "gpus": []}
    code = nvml.nvmlInit_v2()
    if code:
        return {"error": "nvmlInit", "code": code, "gpus": []}

    def text(function: Any, *first: Any) -> str:
        buffer = (c_char * 96)()
        return "" if function(*first, buffer, c_uint(96)) else buffer.value.decode("utf-8", "replace")

    answer: dict[str, Any] = {"driver": text(nvml.nvmlSystemGetDriverVersion) or None, "code": 0, "gpus": []}
    count = c_uint()
    nvml.nvmlDeviceGetCount_v2(byref(count))
    for index in range(count.value):
        handle = c_void_p()
        code = nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(handle))
        if code:
            answer["gpus"].append({"index": index, "error": f"NVML error {code}"})
            continue
        major, minor, mig, later = c_int(), c_int(), c_uint(), c_uint()
        known = nvml.nvmlDeviceGetCudaComputeCapability(handle, byref(major), byref(minor)) == 0
        memory = Memory()
        measured = nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
        nvml.nvmlDeviceGetMigMode(handle, byref(mig), byref(later))
        rows, held = (Process * 64)(), c_uint(64)
        get = getattr(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        listed = get is not None and get(handle, byref(held), rows) == 0
        processes = []
        for row in rows[: held.value] if listed else ():
            used = row.used // MIB if row.used < 1 << 60 else None
            name = text(nvml.nvmlSystemGetProcessName, c_uint(row.pid))
            processes.append({"pid": row.pid, "name": name, "memory_mib": used})
        answer["gpus"].append(
            {
                "index": index,
                "name": text(nvml.nvmlDeviceGetName, handle) or None,
                "uuid": text(nvml.nvmlDeviceGetUUID, handle) or None,
                "sm": f"{major.value}.{minor.value}" if known else None,
                "memory_mib": memory.total // MIB if measured else None,
                "memory_used_mib": memory.used // MIB if measured else None,
                "mig": mig.value == 1,
                "processes": processes,
            }
        )
    return answer


def within(seconds: float) -> dict[str, Any]:
    """NVML's answer from a child: a call into a wedged driver may never return, and nobody waits for such a child."""
    import select
    import signal

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(ask_nvml()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    said, ends = b"", time.monotonic() + seconds
    while True:
        ready = select.select([reader], [], [], max(ends - time.monotonic(), 0))[0]
        if not ready:
            os.kill(child, signal.SIGKILL)
            return {"error": "hangs", "code": 124, "gpus": []}
        part = os.read(reader, 1 << 16)
        if not part:
            break
        said += part
    os.close(reader)
    os.waitpid(child, 0)
    try:
        found: dict[str, Any] = json.loads(said)
        return found
    except ValueError:
        return {"error": "NVML ended its process", "code": 999, "gpus": []}


QUERY = "index,name,driver_version,compute_cap,memory.total,memory.used,mig.mode.current,uuid,pci.bus_id"


def ask_smi(seconds: float) -> dict[str, Any]:
    """The same through nvidia-smi, where the NVML library is not in sight but the program is."""
    import subprocess

    argv = ["nvidia-smi", "--query-gpu=" + QUERY, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": "hangs", "code": 124, "gpus": []}
    except OSError:
        return {"error": "no nvidia-smi", "code": 12, "gpus": []}
    return read_query(done.stdout.decode("utf-8", "replace"), done.returncode)


def read_query(text: str, code: int) -> dict[str, Any]:
    """Rows of nvidia-smi's query form; a GPU's name may hold commas, so columns count from both ends."""
    low = text.lower()
    if "version mismatch" in low:
        return {"error": text.strip()[:200], "code": 18, "gpus": []}
    if "communicate with the nvidia driver" in low:
        return {"error": text.strip()[:200], "code": 9, "gpus": []}
    gpus, driver = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 9 or not cells[0].isdigit():
            continue
        driver = driver or cells[-7]
        sm, total, used = cells[-6], cells[-5], cells[-4]
        row = {"index": int(cells[0]), "name": ", ".join(cells[1:-7]), "uuid": cells[-2], "processes": []}
        row["sm"] = sm if len(numbers(sm)) == 2 else None
        row["memory_mib"] = int(total) if total.isdigit() else None
        row["memory_used_mib"] = int(used) if used.isdigit() else None
        row["mig"] = cells[-3] == "Enabled"
        if "error" in cells[1].lower() or ("lost" in low and row["memory_mib"] is None):
            row["error"] = cells[1]
        gpus.append(row)
    if not gpus and code:
        return {"error": text.strip()[:200] or "nvidia-smi failed", "code": 9 if code != 124 else 124, "gpus": []}
    return {"driver": driver, "code": 0, "gpus": gpus}


def read(folder: str, name: str) -> str:
    """A small file of a record, "" where it is not there."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read(MIB)
    except OSError:
        return ""


def recorded(folder: str) -> dict[str, Any]:
    """What a record folder says; nvml.json first, which also lists processes."""
    if not os.path.isdir(folder):
        raise Refuse("no-record", f"the record folder {folder} is not there", "correct ENVFORGE_RECORDED, or unset it")
    try:
        found: dict[str, Any] = json.loads(read(folder, "nvml.json"))
        found.setdefault("code", 0)
        if found["code"] or found.get("gpus"):
            return found
    except (ValueError, AttributeError):
        pass
    code = read(folder, "nvidia-smi.rc").strip()
    plain, query = read(folder, "nvidia-smi.txt"), read(folder, "nvidia-smi-query.csv")
    if code == "124":
        return {"error": "hangs", "code": 124, "gpus": []}
    found = read_query(query or plain, int(code) if code.isdigit() else 0)
    for line in plain.partition("Processes:")[2].splitlines():
        words = line.strip("| ").split()  # | 0 N/A N/A 4711 C python 1234MiB |
        if len(words) >= 5 and words[0].isdigit() and words[-1].endswith("MiB") and words[-1][:-3].isdigit():
            pid = next((word for word in words[1:] if word.isdigit()), "0")
            held = {"pid": int(pid), "name": words[-2], "memory_mib": int(words[-1][:-3])}
            for gpu in found["gpus"]:
                if gpu["index"] == int(words[0]):
                    gpu["processes"].append(held)
    if not found["gpus"] and not found["code"]:
        found["code"] = 12
    return found


def visible(gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What CUDA_VISIBLE_DEVICES leaves: indexes or beginnings of UUIDs. A word that fits nothing changes nothing."""
    word = os.environ.get("CUDA_VISIBLE_DEVICES")
    if word is None or not gpus:
        return gpus
    names = [name.strip() for name in word.split(",") if name.strip()]
    if any(name.startswith("MIG-") for name in names):
        return gpus
    if not names or names[0] in ("-1", "NoDevFiles"):
        return []
    chosen = [g for g in gpus if str(g["index"]) in names or any((g.get("uuid") or "-").startswith(n) for n in names)]
    return chosen if len(chosen) == len(names) else gpus


def space(folder: str) -> int | None:
    """Free MiB for this user where the folder is, or will be made; None where nothing can be written anyway."""
    while not os.path.isdir(folder) and folder not in ("", "/"):
        folder = os.path.dirname(folder)
    if not os.access(folder, os.W_OK):
        return None  # an image that is mounted read-only is full by its nature
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize // MIB


def surroundings(folder: str | None) -> dict[str, Any]:
    """shm_mib (size of /dev/shm), disk_mib (least free of the cache folders), memlock_kib, rdma (devices there)."""
    shm = disk = None
    try:
        state = os.statvfs("/dev/shm")
        shm = state.f_blocks * state.f_frsize // MIB
    except OSError:
        pass
    places = [os.environ.get(name) for name in ("HF_HOME", "TRITON_CACHE_DIR", "TMPDIR")] + ["/tmp"]
    free = [mib for mib in map(space, filter(None, places)) if mib is not None]
    disk = min(free) if free else None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = UNLIMITED if limit == resource.RLIM_INFINITY else limit // 1024
    try:
        rdma = bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        rdma = False
    found: dict[str, Any] = {"shm_mib": shm, "disk_mib": disk, "memlock_kib": memlock, "rdma": rdma}
    for name in ("shm_mib", "disk_mib", "memlock_kib", "rdma") if folder else ():
        word = read(folder or "", name).strip()
        if word.lstrip("-").isdigit():
            found[name] = bool(int(word)) if name == "rdma" else int(word)
    return found


# --- what is made of it ------------------------------------------------------------------------------------------


def covered(sm: str, codes: list[str], ptx: list[str], jit: bool) -> bool:
    """A cubin runs on the same major with an equal or higher minor, PTX on all that is later (the driver compiles)."""
    have = numbers(sm)
    if any(numbers(code)[0] == have[0] and numbers(code)[1] <= have[1] for code in codes):
        return True
    return jit and any(numbers(code) <= have for code in ptx)


def judge_driver(answer: dict[str, Any], facts: dict[str, Any]) -> None:
    """The driver answers and is new enough."""
    code, floor = answer.get("code"), facts.get("driver_floor")
    reset = "drain the node; its administrator has to look at it"
    if code == 124:
        raise Refuse("driver-hangs", "the NVIDIA driver does not answer (it hangs)", reset)
    if code == 18:
        text = "the driver's kernel module and its libraries have different versions"
        raise Refuse("driver-library-mismatch", text, "restart the node, or reload the driver's modules")
    if code == 17:
        raise Refuse("gpu-blocked", "the operating system blocks access to the GPU", reset)
    if code not in (0, None, 9, 12):
        raise Refuse("driver-broken", f"the NVIDIA driver fails (NVML error {code})", reset)
    if code or not answer.get("gpus"):
        if any(map(os.path.exists, DEVICES)) or os.path.exists("/proc/driver/nvidia/version"):
            text = "the node has an NVIDIA driver, but its libraries or devices are not in the container"
        else:
            text = "no GPU is here, and this image (%s) is for GPUs" % (facts.get("variant") or "CUDA")
        fix = "ask for GPUs: docker --gpus all, apptainer --nv, Slurm --gres, Kubernetes nvidia.com/gpu"
        raise Refuse("no-gpu", text, fix + "; ENVFORGE_PREFLIGHT=off runs without")
    driver = answer.get("driver")
    if floor and driver and numbers(driver) < numbers(floor):
        text = "driver {} is older than {}, which this image ({}) needs".format(driver, floor, facts.get("variant"))
        raise Refuse(
            "driver-too-old", text, f"build for this driver (envforge build ... --driver {driver}), or update it"
        )


def judge_gpus(
    gpus: list[dict[str, Any]], facts: dict[str, Any], wanted: int, own: bool, warnings: list[dict[str, str]]
) -> None:
    """Each GPU answers, has code in the image, and has memory free."""
    if wanted and len(gpus) < wanted:
        text = f"{len(gpus)} GPU(s) are here, {wanted} were asked for"
        raise Refuse("gpu-count", text, "ask the scheduler for that many per node; a lost GPU needs the administrator")
    for gpu in gpus:
        if gpu.get("error"):
            text = "GPU {} does not answer ({})".format(gpu["index"], gpu["error"])
            raise Refuse("gpu-lost", text, "drain the node; the GPU needs a reset by its administrator")
    codes, ptx, planned = (facts.get(name) or [] for name in ("sm", "ptx", "planned_sm"))
    for sm in sorted({gpu["sm"] for gpu in gpus if gpu.get("sm")}):
        name = next(gpu["name"] for gpu in gpus if gpu.get("sm") == sm)
        word = "sm_" + sm.replace(".", "")
        if (codes or ptx) and not covered(sm, codes, ptx, facts.get("tier") != "minor"):
            text = f"{name} ({word}) has no code in this image, which has {shown(codes, ptx)}"
            raise Refuse("no-gpu-code", text, f"build for it: envforge build ... --gpu {word}")
        if planned and not covered(sm, planned, [], False):
            text = f"{name} ({word}) is none of the GPUs that the image was planned for"
            if not (codes or ptx) and all(numbers(sm) < numbers(one) for one in planned):
                raise Refuse("no-gpu-code", text, f"build for it: envforge build ... --gpu {word}")
            warnings.append({"id": "unplanned-gpu", "text": text + ": torch runs on it, other packages may not"})
    for gpu in gpus:
        total, used = gpu.get("memory_mib"), gpu.get("memory_used_mib")
        if total is None or used is None or gpu.get("mig"):
            continue
        need = int(os.environ.get("ENVFORGE_MIN_FREE_MIB") or facts.get("min_free_mib") or 0) or total // 10
        if total - used < need or (own and used > OTHERS):
            held = ["pid {} {} {} MiB".format(p["pid"], p.get("name") or "?", p.get("memory_mib") or "?") for p in
                    gpu.get("processes") or []]  # fmt: skip
            by = (
                "left-over processes hold it: " + ", ".join(held[:4]) if held else "by what is not to be seen from here"
            )
            text = f"GPU {gpu['index']} has {total - used} of {total} MiB free; {by}"
            fix = "end your own processes there (never reset the GPU); if they are not yours, ask for another node"
            raise Refuse("leftover-processes" if held else "gpu-memory", text, fix)
        if gpu.get("processes"):
            count = len(gpu["processes"])
            warnings.append({"id": "shared-gpu", "text": f"GPU {gpu['index']} is used by {count} other process(es)"})


def judge_rest(around: dict[str, Any], nodes: int, warnings: list[dict[str, str]]) -> None:
    """Shared memory, locked memory, disk: mostly warnings, because much runs without."""
    disk, shm = around["disk_mib"], around["shm_mib"]
    if disk is not None and disk < NO_DISK:
        text = f"{disk} MiB are free where caches and temporary files go"
        raise Refuse("disk-full", text, "free some space, or point HF_HOME, TRITON_CACHE_DIR and TMPDIR elsewhere")
    if disk is not None and disk < LITTLE_DISK:
        warnings.append({"id": "disk-low", "text": f"{disk} MiB are free where caches go"})
    if shm is not None and shm < ENOUGH_SHM:
        text = (
            f"/dev/shm has {shm} MiB: give it more (docker --shm-size 8g or --ipc=host; Kubernetes: a memory emptyDir)"
        )
        warnings.append({"id": "small-shm", "text": text})
    if nodes > 1 and around["rdma"] and around["memlock_kib"] != UNLIMITED:
        text = f"locked memory is limited to {around['memlock_kib']} KiB: RDMA falls back to TCP (ulimit -l unlimited)"
        warnings.append({"id": "memlock", "text": text})


def shown(codes: list[str], ptx: list[str]) -> str:
    return " ".join(["sm_" + c.replace(".", "") for c in codes] + ["compute_" + p.replace(".", "") for p in ptx])


# --- the whole ---------------------------------------------------------------------------------------------------


def options(words: list[str]) -> dict[str, Any]:
    """The command line; a word that is not known is told and left out, so that an older image serves a newer job."""
    found: dict[str, Any] = {
        "json": False,
        "quiet": False,
        "own": False,
        "write": "",
        "recorded": "",
        "facts": "",
        "gpus": "0",
        "nodes": "1",
        "address": "",
    }
    words = list(words)
    while words:
        word, equals, value = words.pop(0).partition("=")
        name = word[2:]
        if not word.startswith("--") or name not in found:
            sys.stderr.write(f"preflight: {word} is not known here\n")
        elif isinstance(found[name], bool):
            found[name] = True
        else:
            found[name] = value if equals else (words.pop(0) if words else "")
    return found


def look(given: dict[str, Any], node: str, mode: str) -> dict[str, Any]:
    """The answer for this node as plain data."""
    here = os.path.dirname(os.path.abspath(__file__))
    start = time.perf_counter()
    text = (
        read("", given["facts"]) if given["facts"] else read(here, "preflight.json") or read(here, "../preflight.json")
    )
    facts = json.loads(text) if text else {}
    cpu = facts.get("variant") == "cpu"
    folder = (given["recorded"] or os.environ.get("ENVFORGE_RECORDED") or "").replace("{node}", node)
    warnings: list[dict[str, str]] = []
    cause, answer, gpus = None, {}, []
    around: dict[str, Any] = {}
    try:
        expected, has = given["address"], facts.get("address")
        if expected and has and expected != has:
            text = f"this is image {has[:12]}, the job was made for {expected[:12]}"
            raise Refuse("wrong-image", text, "stage the image again (envforge images export), or make the job again")
        if not cpu:
            seconds = float(os.environ.get("ENVFORGE_PREFLIGHT_SECONDS") or 20)
            if folder:
                answer = recorded(folder)
            else:
                answer = within(seconds)
                if answer.get("code") == 12:
                    answer = ask_smi(seconds)
            judge_driver(answer, facts)
            gpus = visible(answer["gpus"])
            if not gpus:
                text = "CUDA_VISIBLE_DEVICES hides every GPU of this node"
                raise Refuse("no-gpu", text, "ask the scheduler for GPUs (Slurm: --gres), or unset it")
            judge_gpus(gpus, facts, int(given["gpus"] or 0), given["own"], warnings)
        around = surroundings(folder or None)
        judge_rest(around, int(given["nodes"] or 1), warnings)
    except Refuse as refused:
        cause = refused.to_json()
    return {
        "schema": 1,
        "node": node,
        "ok": cause is None or mode == "warn",
        "cause": cause,
        "warnings": warnings,
        "driver": answer.get("driver"),
        "gpus": [{k: g.get(k) for k in ("index", "name", "sm", "memory_mib", "memory_used_mib", "mig")} for g in gpus],
        **around,
        "variant": facts.get("variant"),
        "address": facts.get("address"),
        "digest": os.environ.get("ENVFORGE_IMAGE_DIGEST") or None,
        "recorded": bool(folder),
        "milliseconds": round((time.perf_counter() - start) * 1000, 1),
    }


def line(answer: dict[str, Any]) -> str:
    """The one line of a node."""
    head = "preflight {}: ".format(answer["node"])
    extra = "".join("; warning: " + row["text"] for row in answer["warnings"])
    cause = answer["cause"]
    if cause:
        word = "would be refused" if answer["ok"] else "refused"
        return head + "{}: {}. fix: {}{}".format(word, cause["text"], cause["fix"], extra)
    parts = []
    if answer["driver"]:
        parts.append("driver " + answer["driver"])
    if answer["gpus"]:
        first = answer["gpus"][0]
        parts.append(f"{len(answer['gpus'])} x {first['name'] or 'GPU'}")
        free = [g["memory_mib"] - (g["memory_used_mib"] or 0) for g in answer["gpus"] if g["memory_mib"]]
        if free:
            parts.append(f"{min(free)} MiB free")
    if answer["digest"]:
        parts.append(answer["digest"][:19])
    return head + ", ".join(["ok", *parts]) + extra


def main(words: list[str]) -> int:
    """0, or 86 when this node is refused."""
    mode = os.environ.get("ENVFORGE_PREFLIGHT", "")
    if mode in ("off", "done"):
        return 0
    given = options(words)
    node = os.environ.get("ENVFORGE_NODE") or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    answer = look(given, node, mode)
    text = json.dumps(answer, ensure_ascii=True)
    if given["write"]:
        path = given["write"].replace("{node}", node)
        try:
            with open(path + ".part", "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(path + ".part", path)
        except OSError as error:
            sys.stderr.write(f"preflight: cannot write {path}: {error.strerror}\n")
    # The command's own output stays its own: a person reads the line beside it.
    if given["json"]:
        sys.stdout.write(text + "\n")
    elif answer["cause"] or not given["quiet"] or (answer["warnings"] and answer["gpus"]):
        sys.stderr.write(line(answer) + "\n")
    return 0 if answer["ok"] else REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
