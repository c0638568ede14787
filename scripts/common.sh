# Shared by scripts/try and scripts/test: finds a Python, makes a virtual environment once per state of pyproject.toml.

die() { printf 'error: %s\n' "$1" >&2; [ -z "${2:-}" ] || printf '\nhint: %s\n' "$2" >&2; exit 3; }

# The first Python >= 3.10 that can make virtual environments; $PYTHON wins.
find_python() {
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.10 python3; do
        path=$(command -v "$candidate" 2>/dev/null) || continue
        if "$path" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$path"
            return 0
        fi
    done
    return 1
}

# make_venv DIR REQUIREMENT...: installs once; again when pyproject.toml or the requirements changed.
make_venv() {
    venv=$1
    shift
    stamp=$(cat pyproject.toml; printf '%s\n' "$@")
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    python=$(find_python) || die "no Python >= 3.10 with venv was found" "install python3 and python3-venv, or set PYTHON"
    printf '== setting up %s with %s\n' "$venv" "$python" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --quiet "$@"
    printf '%s\n' "$stamp" >"$venv/.stamp"
}
