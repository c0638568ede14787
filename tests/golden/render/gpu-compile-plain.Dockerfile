# flash: python 3.10, torch 2.6.0+cu126 (cu126). Rendered by envforge; render again instead of editing.
# By hand: docker build .

# What has no ready-made wheel is compiled here; nothing else of this stage goes further.
FROM nvidia/cuda:12.6.3-devel-ubuntu22.04 AS compile
COPY ["build/scripts/", "/run/envforge/scripts/"]
COPY ["build/uv/", "/run/envforge/uv/"]
COPY ["build/settings/", "/run/envforge/settings/"]
ENV CUDA_HOME=/usr/local/cuda TORCH_CUDA_ARCH_LIST="8.0;8.6" MAX_JOBS=2
RUN ["/bin/sh", "/run/envforge/scripts/system.sh", "--python", "3.10", "--headers", "3.10", "g++", "gcc", "git", "make", "ninja-build"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "env", "3.10", "/opt/envforge/env"]
COPY ["build/parts/torch/", "/run/envforge/parts/torch/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/torch", "keep-headers"]
COPY ["build/parts/stack/", "/run/envforge/parts/stack/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/stack", "keep-headers"]
COPY ["build/parts/compile/", "/run/envforge/parts/compile/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "compile", "/opt/envforge/env", "/run/envforge/parts/compile", "/run/envforge/compiled"]

FROM python:3.10-slim-bookworm@sha256:abababababababababababababababababababababababababababababababab AS system
ENV PATH="/opt/envforge/env/bin:/opt/envforge/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" VIRTUAL_ENV="/opt/envforge/env" PYTHONNOUSERSITE="1" PYTHONDONTWRITEBYTECODE="1" PYTHONUNBUFFERED="1" LANG="C.UTF-8" HF_HOME="/opt/envforge/cache/hf" TRITON_CACHE_DIR="/opt/envforge/cache/triton" TORCHINDUCTOR_CACHE_DIR="/opt/envforge/cache/inductor" MPLCONFIGDIR="/opt/envforge/cache/mpl" CUDA_CACHE_PATH="/opt/envforge/cache/cuda" XDG_CACHE_HOME="/opt/envforge/cache/xdg" NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility"
COPY ["build/scripts/", "/run/envforge/scripts/"]
RUN ["/bin/sh", "/run/envforge/scripts/system.sh", "--headers", "3.10", "gcc", "ibverbs-providers", "libc6-dev", "libibverbs1", "librdmacm1"]
RUN ["/bin/sh", "/run/envforge/scripts/folders.sh"]

FROM system AS builder
COPY ["build/uv/", "/run/envforge/uv/"]
COPY ["build/settings/", "/run/envforge/settings/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "env", "3.10", "/opt/envforge/env"]
COPY ["build/parts/torch/", "/run/envforge/parts/torch/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/torch", "keep-headers"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "mark", "/opt/envforge/env"]
COPY ["build/parts/stack/", "/run/envforge/parts/stack/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/stack", "keep-headers"]
COPY --from=compile ["/run/envforge/compiled/", "/run/envforge/compiled/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "compiled", "/opt/envforge/env", "/run/envforge/compiled"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "divide", "/opt/envforge/env", "/run/envforge/layers"]

FROM system AS runtime
COPY --from=builder ["/run/envforge/layers/torch/", "/opt/envforge/env/"]
COPY --from=builder ["/run/envforge/layers/stack/", "/opt/envforge/env/"]
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
