# own-stack: python 3.11, torch 2.13.0+cpu (cpu). Rendered by envforge; render again instead of editing.
# By hand: DOCKER_BUILDKIT=1 docker build --secret id=uv.toml,src=uv.toml --secret id=ca.pem,src=YOUR-CA.pem .
# (uv.toml names the package index; ca.pem is needed only behind a certificate authority of your own)

FROM python:3.11-slim-bookworm@sha256:abababababababababababababababababababababababababababababababab AS runtime
ENV PATH="/opt/envforge/env/bin:/opt/envforge/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" VIRTUAL_ENV="/opt/envforge/env" PYTHONNOUSERSITE="1" PYTHONDONTWRITEBYTECODE="1" PYTHONUNBUFFERED="1" LANG="C.UTF-8" HF_HOME="/opt/envforge/cache/hf" TRITON_CACHE_DIR="/opt/envforge/cache/triton" TORCHINDUCTOR_CACHE_DIR="/opt/envforge/cache/inductor" MPLCONFIGDIR="/opt/envforge/cache/mpl" CUDA_CACHE_PATH="/opt/envforge/cache/cuda" XDG_CACHE_HOME="/opt/envforge/cache/xdg" NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility"
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
    ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/torch", "no-headers"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=secret,id=apt.mirror \
    --mount=type=secret,id=ca.pem \
    ["/bin/sh", "/run/envforge/scripts/system.sh", "libsndfile1", "ffmpeg=7:5.1.6-0+deb12u1"]
RUN --mount=type=bind,source=build/scripts,target=/run/envforge/scripts \
    --mount=type=bind,source=build/uv,target=/run/envforge/uv \
    --mount=type=bind,source=build/parts/stack,target=/run/envforge/parts/stack \
    --mount=type=secret,id=uv.toml \
    --mount=type=secret,id=ca.pem \
    --mount=type=cache,id=envforge-uv,target=/run/envforge/cache \
    ["/bin/sh", "/run/envforge/scripts/install.sh", "part", "/opt/envforge/env", "/run/envforge/parts/stack", "no-headers"]
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
