#!/bin/sh
# Probe of envforge: writes what a machine says about its GPUs into a folder, for `envforge detect --recorded DIR`.
#   sh probe.sh [DIR]    writes DIR (default: envforge-record), which must not exist or be empty
#   sh probe.sh -        writes a tar of such a folder to stdout: kubectl exec -i POD -- sh -s -- - < probe.sh | tar x
# POSIX sh and the usual small tools only; sends nothing anywhere, and of the environment it keeps the names below.

LC_ALL=C
LANG=C
export LC_ALL LANG
unset LANGUAGE
umask 022

target=${1:-envforge-record}
tarred=no
if [ "$target" = - ]; then
    tarred=yes
    holder=${TMPDIR:-/tmp}/envforge-probe.$$
    target=envforge-record
    mkdir "$holder" && cd "$holder" || exit 3
fi

fail() {
    printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2
    exit "$3"
}

case $target in
    -*) target=./$target ;;
esac
while [ "${target%/}" != "$target" ] && [ "$target" != / ]; do target=${target%/}; done
if [ -e "$target" ] || [ -L "$target" ]; then
    [ -d "$target" ] || fail "$target exists and is not a folder" "give a new folder for the record" 2
    [ -z "$(ls -A "$target" 2>/dev/null)" ] || fail "$target exists and is not empty" "give a new folder for the record" 2
fi

staging=$target.tmp.$$
cleanup() {
    rm -rf "$staging"
    if [ "$tarred" = yes ]; then cd / && rm -rf "$holder"; fi
}
trap 'cleanup' EXIT
trap 'exit 130' HUP INT TERM
mkdir "$staging" 2>/dev/null || fail "$staging: the record cannot be written" "choose another place" 3

have() { command -v "$1" >/dev/null 2>&1; }

# keep NAME FILE: copies a file when it can be read.
keep() {
    [ -r "$2" ] || return 0
    cat "$2" >"$staging/$1" 2>/dev/null || rm -f "$staging/$1"
}

nap() { sleep 0.1 2>/dev/null || sleep 1; }

# limited SECONDS OUT RC COMMAND...: output to OUT, exit code to RC, 124 when over the limit. The command gets a process
# group of its own where setsid exists; it is killed with SIGKILL and never waited for, since a wedged driver holds it.
limited() {
    seconds=$1 out=$2 rc=$3
    shift 3
    rm -f "$rc.part" "$rc"
    job='out=$1; rc=$2; shift 2; "$@" >"$out" 2>&1 </dev/null; echo $? >"$rc.part"; mv "$rc.part" "$rc"'
    if have setsid; then
        setsid sh -c "$job" limited "$out" "$rc" "$@" >/dev/null 2>&1 </dev/null &
        victim=-$!
    else
        sh -c "$job" limited "$out" "$rc" "$@" >/dev/null 2>&1 </dev/null &
        victim=$!
    fi
    ends=$(($(date +%s) + seconds))
    while [ ! -s "$rc" ]; do
        if [ "$(date +%s)" -ge "$ends" ]; then
            kill -9 "$victim" 2>/dev/null || kill -9 "${victim#-}" 2>/dev/null
            rm -f "$rc.part"
            echo 124 >"$rc"
            break
        fi
        nap
    done
}

keep proc_driver_nvidia_version /proc/driver/nvidia/version
keep sys_module_nvidia_version /sys/module/nvidia/version
keep proc_version /proc/version
keep os-release /etc/os-release
[ -s "$staging/os-release" ] || keep os-release /usr/lib/os-release
keep nv_tegra_release /etc/nv_tegra_release
grep '^MemTotal:' /proc/meminfo >"$staging/meminfo" 2>/dev/null
uname -m >"$staging/arch"
env | grep -E '^(@ENV_NAMES@)=' >"$staging/env"
ls -d /dev/nvidia* 2>/dev/null | sed 's,^/dev/,,' >"$staging/dev_nvidia"

# The C library: getconf knows glibc only, musl's ldd names itself.
if ! getconf GNU_LIBC_VERSION >"$staging/glibc" 2>/dev/null; then
    if ls /lib/ld-musl-* >/dev/null 2>&1; then
        echo musl >"$staging/glibc"
    else
        ldd --version 2>&1 | head -n 1 >"$staging/glibc"
    fi
fi

if have python3; then
    limited 5 "$staging/python" "$staging/python.rc" python3 --version
    rm -f "$staging/python.rc"
fi

if [ -n "${KUBERNETES_SERVICE_HOST+x}" ]; then
    echo kubernetes
elif [ -n "${APPTAINER_CONTAINER+x}${SINGULARITY_CONTAINER+x}" ]; then
    echo apptainer
elif [ -e /run/.containerenv ]; then
    echo podman
elif [ -e /.dockerenv ]; then
    echo docker
elif grep -q -E 'docker|kubepods|containerd|/lxc' /proc/1/cgroup 2>/dev/null; then
    echo container
else
    echo "${container:-none}"
fi >"$staging/container"

# The shape of lspci -nnk, from /sys: no program needed.
if [ -d /sys/bus/pci/devices ]; then
    for entry in /sys/bus/pci/devices/*; do
        [ -r "$entry/vendor" ] || continue
        read -r vendor <"$entry/vendor"
        read -r device <"$entry/device"
        read -r kind <"$entry/class"
        vendor=${vendor#0x} kind=${kind#0x}
        maker=device
        if [ "$vendor" = 10de ]; then maker="NVIDIA Corporation"; fi
        printf '%s class [%.4s]: %s [%s:%s]\n' "${entry##*/}" "$kind" "$maker" "$vendor" "${device#0x}"
        if [ -e "$entry/driver" ]; then
            driver=$(cd -P "$entry/driver" 2>/dev/null && pwd -P)
            printf '\tKernel driver in use: %s\n' "${driver##*/}"
        fi
    done >"$staging/lspci.txt"
fi

smi=$(command -v nvidia-smi 2>/dev/null)
for place in /usr/lib/wsl/lib /usr/local/nvidia/bin /opt/nvidia/bin /home/kubernetes/bin/nvidia/bin; do
    if [ -z "$smi" ] && [ -x "$place/nvidia-smi" ]; then smi=$place/nvidia-smi; fi
done
if [ -n "$smi" ]; then
    limited 10 "$staging/nvidia-smi.txt" "$staging/nvidia-smi.rc" "$smi"
    # On a wedged driver every further call would hang as well.
    if [ "$(cat "$staging/nvidia-smi.rc")" != 124 ]; then
        limited 10 "$staging/nvidia-smi-query.csv" "$staging/query.rc" \
            "$smi" --query-gpu=@QUERY@ --format=csv,noheader,nounits
        limited 10 "$staging/nvidia-smi-L.txt" "$staging/list.rc" "$smi" -L
        rm -f "$staging/query.rc" "$staging/list.rc"
    fi
fi

# engine NAME FORMAT: the first engine that answers is kept, else the first that is installed.
engine() {
    have "$1" || return 0
    case $(cat "$staging/engine" 2>/dev/null) in *[0-9]*) return 0 ;; esac
    limited 2 "$staging/engine.out" "$staging/engine.rc" "$1" version --format "$2"
    version=$(head -n 1 "$staging/engine.out" 2>/dev/null)
    if [ "$(cat "$staging/engine.rc")" = 0 ] && [ -n "$version" ]; then
        echo "$1 $version" >"$staging/engine"
    elif [ ! -s "$staging/engine" ]; then
        echo "$1 -" >"$staging/engine"
    fi
    rm -f "$staging/engine.out" "$staging/engine.rc"
}
engine docker '{{.Server.Version}}'
engine podman '{{.Client.Version}}'

if [ "$tarred" = yes ]; then
    mv "$staging" "$target" && tar cf - "$target" || fail "no tar could be written" "run it with a folder name instead" 3
    exit 0
fi
if [ -d "$target" ]; then rmdir "$target" || fail "$target is not empty any more" "give a new folder" 2; fi
mv "$staging" "$target" || fail "$target: the record cannot be written" "choose another place" 3
echo "record written to $target" >&2
