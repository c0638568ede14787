# own-stack: python 3.11, torch 2.13.0+cpu (cpu). Rendered by envforge; render again instead of editing.
# By hand: docker build .

FROM python:3.11-slim-bookworm@sha256:abababababababababababababababababababababababababababababababab AS system
ENV PATH="/opt/envforge/env/bin:/opt/envforge/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" VIRTUAL_ENV="/opt/envforge/env" PYTHONNOUSERSITE="1" PYTHONDONTWRITEBYTECODE="1" PYTHONUNBUFFERED="1" LANG="C.UTF-8" HF_HOME="/opt/envforge/cache/hf" TRITON_CACHE_DIR="/opt/envforge/cache/triton" TORCHINDUCTOR_CACHE_DIR="/opt/envforge/cache/inductor" MPLCONFIGDIR="/opt/envforge/cache/mpl" CUDA_CACHE_PATH="/opt/envforge/cache/cuda" XDG_CACHE_HOME="/opt/envforge/cache/xdg" NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility"
COPY ["build/scripts/", "/run/envforge/scripts/"]
RUN ["/bin/sh", "/run/envforge/scripts/folders.sh"]

FROM system AS builder
COPY ["build/uv/", "/run/envforge/uv/"]
COPY ["build/settings/", "/run/envforge/settings/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "env", "3.11", "/opt/envforge/env"]
COPY ["build/parts/torch/", "/run/envforge/parts/torch/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/torch", "no-headers"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "mark", "/opt/envforge/env"]
COPY ["build/parts/stack/", "/run/envforge/parts/stack/"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/stack", "no-headers"]
RUN ["/bin/sh", "/run/envforge/scripts/install.sh", "divide", "/opt/envforge/env", "/run/envforge/layers"]

FROM system AS runtime
RUN ["/bin/sh", "/run/envforge/scripts/system.sh", "libsndfile1", "ffmpeg=7:5.1.6-0+deb12u1"]
COPY --from=builder ["/run/envforge/layers/torch/", "/opt/envforge/env/"]
COPY --from=builder ["/run/envforge/layers/stack/", "/opt/envforge/env/"]
COPY ["image/", "/opt/envforge/"]
COPY ["site/", "/opt/envforge/env/lib/python3.11/site-packages/"]
COPY ["files/0000", "/etc/own stack.conf"]
COPY ["files/0001", "/opt/x/\\$y"]
ENV A="1"
ENV GREETING="say \"hi\" to \$USER \\ `id`"
USER 1000:0
WORKDIR /workspace
ENTRYPOINT ["/opt/envforge/bin/envforge-entrypoint"]
CMD ["python"]
LABEL "org.opencontainers.image.title"="own-stack"
LABEL "org.opencontainers.image.base.name"="python:3.11-slim-bookworm@sha256:abababababababababababababababababababababababababababababababab"
LABEL "envforge.stack"="own-stack"
LABEL "envforge.python"="3.11"
LABEL "envforge.torch"="2.13.0+cpu"
LABEL "envforge.variant"="cpu"
LABEL "envforge.sm"=""
LABEL "envforge.driver-floor"=""
LABEL "envforge.lock-hash"="b101124969af9ad94f842a52d4fd75ff5abf244e9d97ee37beea83166b6f775f"
LABEL "envforge.plan-hash"="1111111111111111111111111111111111111111111111111111111111111111"
LABEL "envforge.plan"="{\"the\": \"plan\"}"
LABEL "envforge.address"="0000000000000000000000000000000000000000000000000000000000000000"
LABEL "org.opencontainers.image.base.digest"="sha256:abababababababababababababababababababababababababababababababab"
LABEL "org.opencontainers.image.created"="2023-11-14T22:13:20Z"
