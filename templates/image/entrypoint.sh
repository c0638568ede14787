#!/bin/sh
# envforge-entrypoint verify [OPTION...] | preflight [OPTION...] | COMMAND [ARGUMENT...]
# Stands in <root>/bin; the environment is <root>/env. Runs the command in its place, so signals and exit codes are its own.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)

# Sealed against the host: nothing of the caller's Python or of its libraries may leak into the environment.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP
if [ "${ENVFORGE_KEEP_LIBRARY_PATH:-}" != 1 ]; then
    unset LD_LIBRARY_PATH
fi
PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 PATH="$root/env/bin:$root/bin:$PATH" VIRTUAL_ENV="$root/env"
export PYTHONNOUSERSITE PYTHONDONTWRITEBYTECODE PATH VIRTUAL_ENV

# Caches and temporary files that cannot be written would end in a traceback deep inside a library: go where something
# can be written, or say once that there is no such place. A read-only container still has /dev/shm.
scratch=
for folder in "${TMPDIR:-/tmp}" /var/tmp "${HF_HOME:-}" "${TRITON_CACHE_DIR:-}" /dev/shm; do
    if [ -n "$folder" ] && [ -d "$folder" ] && [ -w "$folder" ]; then
        scratch=$folder
        break
    fi
done
if [ -z "$scratch" ]; then
    echo "envforge: uid $(id -u) can write nowhere here: give it a writable folder (docker: --tmpfs /tmp)" >&2
    exit 3
fi
if [ "$scratch" != "${TMPDIR:-/tmp}" ]; then
    TMPDIR=$(mktemp -d "$scratch/envforge-tmp.XXXXXX")
    export TMPDIR
fi
cache=$root/cache
if [ ! -d "$cache" ] || [ ! -w "$cache" ]; then
    cache=$(mktemp -d "$scratch/envforge-cache.XXXXXX")
    # Only what still points into the folder that cannot be written; what the caller mounted elsewhere stays.
    case ${HF_HOME:-} in "$root"/cache*) HF_HOME=$cache/hf && export HF_HOME ;; esac
    case ${XDG_CACHE_HOME:-} in "$root"/cache*) XDG_CACHE_HOME=$cache/xdg && export XDG_CACHE_HOME ;; esac
    case ${TRITON_CACHE_DIR:-} in "$root"/cache*) TRITON_CACHE_DIR=$cache/triton ;; esac
    case ${TORCHINDUCTOR_CACHE_DIR:-} in "$root"/cache*) TORCHINDUCTOR_CACHE_DIR=$cache/inductor ;; esac
    case ${MPLCONFIGDIR:-} in "$root"/cache*) MPLCONFIGDIR=$cache/mpl ;; esac
    case ${CUDA_CACHE_PATH:-} in "$root"/cache*) CUDA_CACHE_PATH=$cache/cuda ;; esac
fi
: "${TRITON_CACHE_DIR:=$cache/triton}" "${TORCHINDUCTOR_CACHE_DIR:=$cache/inductor}" "${MPLCONFIGDIR:=$cache/mpl}"
: "${CUDA_CACHE_PATH:=$cache/cuda}"
export TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR MPLCONFIGDIR CUDA_CACHE_PATH

if [ "$#" = 0 ]; then
    set -- python
fi
case $1 in
verify)
    shift
    # The stack's own settings are defaults; options given here win.
    exec "$root/env/bin/python" -m envforge.verify --plan "$root/plan.json" --lock "$root/requirements.txt" \
        --settings "$root/verify.json" "$@"
    ;;
preflight)
    shift
    exec "$root/env/bin/python" -IS "$root/preflight.py" "$@"
    ;;
*)
    # A node that cannot run this image is told at once (exit 86), not after the model was loaded. Jobs have looked
    # before, once per node, and say so; `verify` looks closer itself.
    case ${ENVFORGE_PREFLIGHT:-} in
    off | done) ;;
    *) "$root/env/bin/python" -IS "$root/preflight.py" --quiet || exit $? ;;
    esac
    exec "$@"
    ;;
esac
