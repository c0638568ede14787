#!/bin/sh
# Installs Debian packages while an image is built. Fixed text: every value comes as an argument or as a file.
#   system.sh [--python X.Y] [--headers X.Y] PACKAGE...             install them
#   system.sh --versions [--python X.Y] [--headers X.Y] PACKAGE...  only print what would be: lines name=version, and how
#                                                                   much disk they take
#   system.sh --fetch FOLDER PACKAGE...                             only download them, with what they need, into FOLDER
# --python adds the interpreter where the base has none of that version.
# --headers adds the C headers of the interpreter where the base does not bring them (Triton compiles a small launcher
# against them at run time); a base with an interpreter of its own under /usr/local already has them.
# Where the packages come from: a folder `debs` beside this script's own (then nowhere else), or the base's sources, with
# the host of the secret apt.mirror in place of theirs; a certificate authority comes from the secret ca.pem.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
action=install
folder=
case ${1:-} in
--versions) action=versions && shift ;;
--fetch) action=fetch folder=$2 && shift 2 ;;
esac
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

secret() { # prints the path of a secret, or nothing
    for place in /run/secrets "$root/settings"; do
        if [ -s "$place/$1" ]; then
            echo "$place/$1"
            return
        fi
    done
}

# apt's settings for this run only, outside of what stays in the image.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir "$work/parts"
: >"$work/sources.list"
ca=$(secret ca.pem)
mirror=$(secret apt.mirror)
elsewhere=
if [ -f "$root/debs/Packages" ]; then
    # Every file was compared with its recorded hash before it came here, and apt compares it with the index.
    echo "deb [trusted=yes] file:$root/debs ./" >"$work/sources.list"
    elsewhere=yes
elif [ -n "$mirror" ]; then
    for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
        [ -f "$list" ] || continue
        mirror=$(cat "$mirror") awk '{
            out = ""
            while (match($0, /https?:\/\/[^\/ ]+/)) {
                out = out substr($0, 1, RSTART - 1) ENVIRON["mirror"]
                $0 = substr($0, RSTART + RLENGTH)
            }
            print out $0
        }' "$list" >"$work/parts/$(basename "$list")"
    done
    if [ -f "$work/parts/sources.list" ]; then
        mv "$work/parts/sources.list" "$work/sources.list"
    fi
    elsewhere=yes
fi
{
    if [ -n "$elsewhere" ]; then
        echo "Dir::Etc::sourcelist \"$work/sources.list\";"
        echo "Dir::Etc::sourceparts \"$work/parts\";"
    fi
    if [ -n "$ca" ]; then
        echo "Acquire::https::CaInfo \"$ca\";"
    fi
    echo 'APT::Sandbox::User "root";' # secrets and mounted folders are root's alone
    echo 'Acquire::Retries "2";'
} >"$work/apt.conf"
APT_CONFIG=$work/apt.conf DEBIAN_FRONTEND=noninteractive
export APT_CONFIG DEBIAN_FRONTEND

forget() { # what the package manager keeps for itself has no use in an image
    apt-get clean
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log /var/log/alternatives.log \
        /var/cache/ldconfig/aux-cache
}

case $action in
versions)
    apt-get update >&2
    for package in "$@"; do
        case $package in
        *=*) echo "$package" && continue ;;
        esac
        found=$(apt-cache policy -- "$package" | sed -n 's/^  Candidate: //p')
        if [ -z "$found" ] || [ "$found" = '(none)' ]; then
            echo "E: Unable to locate package $package" >&2
            exit 66
        fi
        echo "$package=$found"
    done
    # What they take on disk with all that they need, in apt's own words; the answer "no" is no failure here.
    LC_ALL=C apt-get install --assume-no --no-install-recommends -- "$@" 2>/dev/null | grep '^After this operation' || true
    ;;
fetch)
    apt-get update
    mkdir -p "$folder/partial"
    apt-get install -y --no-install-recommends --download-only -o "Dir::Cache::archives=$folder" -- "$@"
    rm -rf "$folder/partial" "$folder/lock"
    # The index of these files, as apt wants it; their hashes are the base's own work.
    cd "$folder"
    for file in *.deb; do
        [ -f "$file" ] || continue
        dpkg-deb -f "$file"
        echo "Filename: ./$file"
        echo "Size: $(stat -c %s "$file")"
        echo "SHA256: $(sha256sum "$file" | cut -d' ' -f1)"
        echo
    done >Packages.new
    mv Packages.new Packages
    ;;
install)
    apt-get update
    apt-get install -y --no-install-recommends -- "$@"
    # Static archives that only a statically linked interpreter or a sanitizer would need.
    rm -f /usr/lib/python3.*/config-*/*.a /usr/lib/*/libpython3.*.a /usr/lib/gcc/*/*/lib*san.a
    forget
    ;;
esac
