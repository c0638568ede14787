#!/bin/sh
# Installs one part of the lock into the environment while an image is built. Fixed text: every value comes as an argument.
#   install.sh env PYTHON ENV       make the empty environment with the base's own interpreter
#   install.sh part ENV PART HEADERS  install PART/requirements.txt (hashed, exact), wheels first looked for in PART/wheels;
#                                   HEADERS: keep-headers or no-headers (nothing will ever compile in the image)
#   install.sh compile ENV PART TARGET   compile PART/requirements.txt against what ENV holds, into the folder TARGET
#   install.sh compiled ENV FOLDER  put what another stage compiled into the environment
#   install.sh mark ENV             remember what is there, so that `divide` can tell the parts apart
#   install.sh divide ENV LAYERS    split the environment into LAYERS/torch (up to the mark) and LAYERS/stack (since)
# The index comes from the secret uv.toml, a certificate authority from the secret ca.pem; neither stays in a layer.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
uv=$root/uv/uv
action=$1
shift

secret() { # prints the path of a secret, or nothing
    for folder in /run/secrets "$root/settings"; do
        if [ -f "$folder/$1" ]; then
            echo "$folder/$1"
            return
        fi
    done
}

slim() { # ENV HEADERS [PART]: a compiler that the base brings may be used, so it keeps the headers too
    headers=$2
    for compiler in cc gcc g++ clang nvcc; do
        if command -v "$compiler" >/dev/null; then
            headers=keep-headers
        fi
    done
    "$1/bin/python" -I -B "$root/scripts/slim.py" "$1" "$headers" ${3:+"$3/requirements.txt"}
}

# The cache is named here because the image's own environment points elsewhere, into a folder that stays in the layer.
cache=/run/envforge/cache
UV_CACHE_DIR=$cache UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1
export UV_CACHE_DIR UV_LINK_MODE UV_PYTHON_DOWNLOADS UV_NO_PROGRESS

forget_cache() { # a mounted cache is kept for the next build, any other would end in a layer
    if ! grep -q " $cache " /proc/self/mounts; then
        rm -rf "$cache"
    fi
}
trap forget_cache EXIT

case $action in
env)
    "$uv" venv --no-config --no-project --python-preference only-system --python "$1" "$2"
    ;;
part | compile)
    env=$1 part=$2 target=${3:-}
    if ! grep -q '^[A-Za-z0-9]' "$part/requirements.txt"; then
        echo "nothing to install in this part"
        exit 0
    fi
    config=$(secret uv.toml)
    if [ -z "$config" ]; then
        echo "error: the secret uv.toml, which names the package index, was not given to this build" >&2
        exit 64
    fi
    ca=$(secret ca.pem)
    if [ -n "$ca" ]; then
        SSL_CERT_FILE=$ca
        export SSL_CERT_FILE
    fi
    if [ "$action" = compile ]; then
        # Without isolation: these packages import torch in their build code and must see the one they will run on.
        "$uv" --config-file "$config" pip install --python "$env/bin/python" --no-deps --require-hashes \
            --only-binary :all: --index-strategy unsafe-best-match --requirements "$root/scripts/tools.txt"
        PATH=$env/bin:$PATH
        export PATH
        "$uv" --config-file "$config" pip install --python "$env/bin/python" --target "$target" --no-deps \
            --require-hashes --no-build-isolation --index-strategy unsafe-best-match \
            --find-links "$part/wheels" --requirements "$part/requirements.txt"
        exit 0
    fi
    # Every pin is exact and hashed, so which index answers first cannot matter; the best match is the only match.
    "$uv" --config-file "$config" pip install --python "$env/bin/python" --no-deps --require-hashes \
        --only-binary :all: --index-strategy unsafe-best-match \
        --find-links "$part/wheels" --requirements "$part/requirements.txt"
    slim "$env" "${3:-keep-headers}" "$part"
    ;;
compiled)
    site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for entry in "$2"/*; do
        case ${entry##*/} in
        bin) cp -a "$entry/." "$1/bin/" ;;
        *) cp -a "$entry" "$site/" ;;
        esac
    done
    slim "$1" keep-headers
    ;;
mark)
    cd "$1" && find . ! -type d | sort >/tmp/envforge-mark
    ;;
divide)
    env=$1 layers=$2
    cd "$env"
    mkdir -p "$layers/torch" "$layers/stack"
    find . ! -type d | sort >/tmp/envforge-all
    comm -13 /tmp/envforge-mark /tmp/envforge-all >/tmp/envforge-new
    tar -cf - --no-recursion -T /tmp/envforge-mark | tar -xf - -C "$layers/torch"
    tar -cf - --no-recursion -T /tmp/envforge-new | tar -xf - -C "$layers/stack"
    ;;
*)
    echo "error: install.sh does not know '$action'" >&2
    exit 64
    ;;
esac
