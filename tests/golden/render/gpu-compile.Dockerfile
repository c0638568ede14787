# flash: python 3.10, torch 2.6.0+cu126 (cu126). Rendered by envforge; render again instead of editing.
# By hand: DOCKER_BUILDKIT=1 docker build --secret id=uv.toml,src=uv.toml --secret id=ca.pem,src=YOUR-CA.pem .
# (uv.toml names the package index; ca.pem is needed only behind a certificate authority of your own)

# What has no ready-made wheel is compiled here; nothing else of this stage goes further.
FROM nvidia/cuda:12.6.3-devel-ubuntu22.04 AS compile
ENV CUDA_HOME=/usr/local/cuda TORCH_CUDA_ARCH_LIST="8.0;8.6" MAX_JOBS=2
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=secret,id=apt.mirror \
    --mount=type=secret,id=ca.pem \
    ["/bin/sh", "/run/envforge/scripts/system.sh", "--python", "3.10", "--headers", "3.10", "g++", "gcc", "git", "make", "ninja-build"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=bind,source=build/uv,target=/run/envforge/uv \
    ["/bin/sh", "/run/envforge/scripts/install.sh", "env", "3.10", "/opt/envforge/env"]
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
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=bind,source=build/uv,target=/run/envforge/uv \
    --mount=type=bind,source=build/parts/compile,target=/run/envforge/parts/compile \
    --mount=type=secret,id=uv.toml \
    --mount=type=secret,id=ca.pem \
    --mount=type=cache,id=envforge-uv,target=/run/envforge/cache \
    ["/bin/sh", "/run/envforge/scripts/install.sh", "compile", "/opt/envforge/env", "/run/envforge/parts/compile", "/run/envforge/compiled"]

FROM python:3.10-slim-bookworm@sha256:abababababababababababababababababababababababababababababababab AS runtime
ENV PATH="/opt/envforge/env/bin:/opt/envforge/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" VIRTUAL_ENV="/opt/envforge/env" PYTHONNOUSERSITE="1" PYTHONDONTWRITEBYTECODE="1" PYTHONUNBUFFERED="1" LANG="C.UTF-8" HF_HOME="/opt/envforge/cache/hf" TRITON_CACHE_DIR="/opt/envforge/cache/triton" TORCHINDUCTOR_CACHE_DIR="/opt/envforge/cache/inductor" MPLCONFIGDIR="/opt/envforge/cache/mpl" CUDA_CACHE_PATH="/opt/envforge/cache/cuda" XDG_CACHE_HOME="/opt/envforge/cache/xdg" NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility"
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=secret,id=apt.mirror \
    --mount=type=secret,id=ca.pem \
    ["/bin/sh", "/run/envforge/scripts/system.sh", "--headers", "3.10", "gcc", "ibverbs-providers", "libc6-dev", "libibverbs1", "librdmacm1"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    ["/bin/sh", "/run/envforge/scripts/folders.sh"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=bind,source=build/uv,target=/run/envforge/uv \
    ["/bin/sh", "/run/envforge/scripts/install.sh", "env", "3.10", "/opt/envforge/env"]
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
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=bind,from=compile,source=/run/envforge/compiled,target=/run/envforge/compiled \
    ["/bin/sh", "/run/envforge/scripts/install.sh", "compiled", "/opt/envforge/env", "/run/envforge/compiled"]
COPY ["image/", "/opt/envforge/"]
COPY ["site/", "/opt/envforge/env/lib/python3.10/site-packages/"]
USER 1000:0
WORKDIR /workspace
ENTRYPOINT ["/opt/envforge/bin/envforge-entrypoint"]
CMD ["python"]
LABEL "org.opencontainers.image.title"="flash"
LABEL "org.opencontainers.image.base.name"="python:3.10-slim-bookworm@sha256:abababababababababababababababababababababababababababababababab"
LABEL "envforge.stack"="flash"
LABEL "envforge.python"="3.10"
LABEL "envforge.torch"="2.6.0+cu126"
LABEL "envforge.variant"="cu126"
LABEL "envforge.sm"="8.0,8.6"
LABEL "envforge.driver-floor"="525.60.13"
LABEL "envforge.lock-hash"="4d5eee2689d1770598c7b8591f12b6b8741a4c73699453b217a0a062b409cb67"
LABEL "envforge.plan-hash"="1111111111111111111111111111111111111111111111111111111111111111"
LABEL "envforge.plan"="{\"the\": \"plan\"}"
LABEL "envforge.address"="0000000000000000000000000000000000000000000000000000000000000000"
LABEL "org.opencontainers.image.base.digest"="sha256:abababababababababababababababababababababababababababababababab"
LABEL "org.opencontainers.image.created"="2023-11-14T22:13:20Z"
