# unsloth: python 3.11, torch 2.6.0+cu126 (cu126). Rendered by envforge; render again instead of editing.
# By hand: DOCKER_BUILDKIT=1 docker build --secret id=uv.toml,src=uv.toml --secret id=ca.pem,src=YOUR-CA.pem .
# (uv.toml names the package index; ca.pem is needed only behind a certificate authority of your own)

FROM python:3.11-slim-bookworm@sha256:abababababababababababababababababababababababababababababababab AS runtime
ENV PATH="/opt/envforge/env/bin:/opt/envforge/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" VIRTUAL_ENV="/opt/envforge/env" PYTHONNOUSERSITE="1" PYTHONDONTWRITEBYTECODE="1" PYTHONUNBUFFERED="1" LANG="C.UTF-8" HF_HOME="/opt/envforge/cache/hf" TRITON_CACHE_DIR="/opt/envforge/cache/triton" TORCHINDUCTOR_CACHE_DIR="/opt/envforge/cache/inductor" MPLCONFIGDIR="/opt/envforge/cache/mpl" CUDA_CACHE_PATH="/opt/envforge/cache/cuda" XDG_CACHE_HOME="/opt/envforge/cache/xdg" NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility"
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=secret,id=apt.mirror \
    --mount=type=secret,id=ca.pem \
    ["/bin/sh", "/run/envforge/scripts/system.sh", "--headers", "3.11", "gcc", "ibverbs-providers", "libc6-dev", "libibverbs1", "librdmacm1"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    ["/bin/sh", "/run/envforge/scripts/folders.sh"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=bind,source=build/uv,target=/run/envforge/uv \
    ["/bin/sh", "/run/envforge/scripts/install.sh", "env", "3.11", "/opt/envforge/env"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=bind,source=build/uv,target=/run/envforge/uv \
    --mount=type=bind,source=build/parts/torch,target=/run/envforge/parts/torch \
    --mount=type=secret,id=uv.toml \
    --mount=type=secret,id=ca.pem \
    --mount=type=cache,id=envforge-uv,target=/run/envforge/cache \
    ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/torch", "keep-headers"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=bind,source=build/uv,target=/run/envforge/uv \
    --mount=type=bind,source=build/parts/stack,target=/run/envforge/parts/stack \
    --mount=type=secret,id=uv.toml \
    --mount=type=secret,id=ca.pem \
    --mount=type=cache,id=envforge-uv,target=/run/envforge/cache \
    ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/stack", "keep-headers"]
COPY ["image/", "/opt/envforge/"]
COPY ["site/", "/opt/envforge/env/lib/python3.11/site-packages/"]
USER 1000:0
WORKDIR /workspace
ENTRYPOINT ["/opt/envforge/bin/envforge-entrypoint"]
CMD ["python"]
LABEL "org.opencontainers.image.title"="unsloth"
LABEL "org.opencontainers.image.base.name"="python:3.11-slim-bookworm@sha256:abababababababababababababababababababababababababababababababab"
LABEL "envforge.stack"="unsloth"
LABEL "envforge.python"="3.11"
LABEL "envforge.torch"="2.6.0+cu126"
LABEL "envforge.variant"="cu126"
LABEL "envforge.sm"="8.0,8.6"
LABEL "envforge.driver-floor"="525.60.13"
LABEL "envforge.lock-hash"="b6a2ea378b1f053f5ec4856ddbbdea57c9a5085e6f59497912e4f1b9a9cab690"
LABEL "envforge.plan-hash"="1111111111111111111111111111111111111111111111111111111111111111"
LABEL "envforge.plan"="{\"the\": \"plan\"}"
LABEL "envforge.address"="0000000000000000000000000000000000000000000000000000000000000000"
LABEL "org.opencontainers.image.base.digest"="sha256:abababababababababababababababababababababababababababababababab"
LABEL "org.opencontainers.image.created"="2023-11-14T22:13:20Z"
