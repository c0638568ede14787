#!/bin/sh
# envforge-entrypoint verify [OPTION...] | COMMAND [ARGUMENT...]
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

# Caches that cannot be written would end in a traceback deep inside a library: go elsewhere, or say so once.
cache=$root/cache
if [ ! -d "$cache" ] || [ ! -w "$cache" ]; then
    if cache=$(mktemp -d "${TMPDIR:-/tmp}/envforge-cache.XXXXXX" 2>/dev/null); then
        case ${HF_HOME:-$root/cache} in "$root"/cache*) HF_HOME=$cache/hf ;; esac
        case ${TRITON_CACHE_DIR:-$root/cache} in "$root"/cache*) TRITON_CACHE_DIR=$cache/triton ;; esac
        case ${TORCHINDUCTOR_CACHE_DIR:-$root/cache} in "$root"/cache*) TORCHINDUCTOR_CACHE_DIR=$cache/inductor ;; esac
        case ${MPLCONFIGDIR:-$root/cache} in "$root"/cache*) MPLCONFIGDIR=$cache/mpl ;; esac
        case ${CUDA_CACHE_PATH:-$root/cache} in "$root"/cache*) CUDA_CACHE_PATH=$cache/cuda ;; esac
        case ${XDG_CACHE_HOME:-$root/cache} in "$root"/cache*) XDG_CACHE_HOME=$cache/xdg ;; esac
        export HF_HOME TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR MPLCONFIGDIR CUDA_CACHE_PATH XDG_CACHE_HOME
    else
        echo "envforge: neither $root/cache nor ${TMPDIR:-/tmp} can be written by uid $(id -u):" \
            "mount a writable folder on one of them (docker: --tmpfs /tmp)" >&2
        if [ "${1:-}" = verify ]; then
            exit 3
        fi
    fi
else
    : "${TRITON_CACHE_DIR:=$cache/triton}" "${TORCHINDUCTOR_CACHE_DIR:=$cache/inductor}" "${MPLCONFIGDIR:=$cache/mpl}"
    : "${CUDA_CACHE_PATH:=$cache/cuda}"
    export TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR MPLCONFIGDIR CUDA_CACHE_PATH
fi

if [ "$#" = 0 ]; then
    set -- python
fi
case $1 in
verify)
    shift
    # The stack's own settings come first, so that options given here win.
    while IFS= read -r argument; do
        case $argument in '' | '#'*) ;; *) set -- "$argument" "$@" ;; esac
    done <"$root/verify.args"
    exec "$root/env/bin/python" -m envforge.verify --plan "$root/plan.json" "$@"
    ;;
*)
    exec "$@"
    ;;
esac
