#!/bin/sh
# Installs Debian packages while an image is built. Fixed text: every package name comes as an argument.
#   system.sh [--python X.Y] [--headers X.Y] PACKAGE...
# --python adds the interpreter where the base has none of that version.
# --headers adds the C headers of the interpreter where the base does not bring them (Triton compiles a small launcher
# against them at run time); a base with an interpreter of its own under /usr/local already has them.
set -eu

if [ "${1:-}" = --python ]; then
    version=$2
    shift 2
    if ! command -v "python$version" >/dev/null; then
        set -- "$@" "python$version"
    fi
fi
if [ "${1:-}" = --headers ]; then
    version=$2
    shift 2
    own=$(command -v "python$version" || echo "/usr/bin/python$version")
    # An interpreter of the distribution has its headers in a package of its own; others bring theirs.
    if [ "$own" = "/usr/bin/python$version" ] && [ ! -f "/usr/include/python$version/Python.h" ]; then
        set -- "$@" "libpython$version-dev"
    fi
fi
if [ "$#" = 0 ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "error: this base has no apt-get, so system packages cannot be added: choose a Debian or Ubuntu base" >&2
    exit 65
fi
DEBIAN_FRONTEND=noninteractive
export DEBIAN_FRONTEND
apt-get update
apt-get install -y --no-install-recommends -- "$@"
# What the package manager keeps for itself has no use in an image.
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log /var/log/alternatives.log /var/cache/ldconfig/aux-cache
