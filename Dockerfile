# syntax=docker/dockerfile:1.7
# The image of head, workers and submitter, for the chart, or to build on with your own code:
#
#   docker build -t rayzero:0.1.0 .
#   docker build -t rayzero:0.1.0-cu130 --build-arg VARIANT=cu130 .
#
# VARIANT is a folder of torch's index that has the torch of constraints.txt; a mirror of that index is
# --build-arg TORCH_INDEX=https://..., one of PyPI PIP_INDEX_URL. A digest pins the base for good:
# --build-arg PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG VARIANT=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${VARIANT}
ARG PIP_INDEX_URL=https://pypi.org/simple

FROM ${PYTHON_IMAGE} AS base
ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# Python's own pip takes twice as long for the rest.
RUN python -m venv /opt/rayzero \
    && /opt/rayzero/bin/pip install --constraint constraints.txt pip

# torch in a layer of its own: it is most of the image, and changes seldom. Its index has torch and some
# version of what torch needs, CUDA's libraries included; the driver comes from the host. Only torch is
# pinned here: the index does not have all versions of the rest, which the next stage's pins replace.
FROM base AS torch
ARG TORCH_INDEX
RUN /opt/rayzero/bin/pip install --index-url "${TORCH_INDEX}" "$(grep ^torch== constraints.txt)"

FROM torch AS build
ARG PIP_INDEX_URL
COPY pyproject.toml README.md LICENSE ./
COPY rayzero rayzero
COPY engine engine
COPY workers workers
COPY orchestrator orchestrator
RUN /opt/rayzero/bin/pip install --constraint constraints.txt .

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="rayzero" \
      org.opencontainers.image.licenses="Apache-2.0"
# wget: KubeRay's probes ask with it. gcc: torch.compile makes its kernels with it. The others are RDMA's user
# space, without which NCCL does not see InfiniBand and RoCE.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        gcc libc6-dev wget rdma-core libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
# Any uid will do, as long as its group is 0: nothing else is written to.
# Where KubeRay starts Ray in a login shell (ENABLE_LOGIN_SHELL), /etc/profile would lose the PATH below.
RUN echo 'export PATH=/opt/rayzero/bin:$PATH' > /etc/profile.d/rayzero.sh
RUN useradd --uid 1000 --gid 0 --create-home rayzero \
    && mkdir -p /app /work \
    && chgrp -R 0 /home/rayzero /work \
    && chmod -R g=u /home/rayzero /work
COPY --from=build /opt/rayzero /opt/rayzero
COPY examples /app/examples
ENV PATH=/opt/rayzero/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/home/rayzero \
    USER=rayzero \
    RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:0
WORKDIR /work
EXPOSE 6379 8265 8266 9400 10001
# Whatever runs here, there is a Ray node with it.
HEALTHCHECK --interval=60s --timeout=20s --start-period=90s --retries=3 CMD ["ray", "health-check"]
CMD ["rayzero", "--help"]
