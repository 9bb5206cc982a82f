# VK: the engine alone, none of the harness. Build from the repository's root (`make images`).
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

ARG PIP_ARGUMENTS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
# The packages first: they change less often than the code, and take almost all of the time.
COPY constraints.txt engine/pyproject.toml engine/README.md /opt/engine/
RUN mkdir -p /opt/engine/vkengine && touch /opt/engine/vkengine/__init__.py \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install ${PIP_ARGUMENTS} -c /opt/engine/constraints.txt -e /opt/engine
COPY engine/vkengine /opt/engine/vkengine
COPY engine/models /opt/engine/models
COPY containers/vk-model.py /opt/venv/bin/vk-model
RUN chmod 755 /opt/venv/bin/vk-model && mkdir -m 1777 /cache \
    && /opt/venv/bin/python -m compileall -q /opt/engine/vkengine \
    && /opt/venv/bin/vk --help > /dev/null

# Everything that is written goes to /tmp and /cache, so the root may be read-only. `--gpus` needs
# no more than these two capabilities of the driver.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp HF_HOME=/cache TRITON_CACHE_DIR=/tmp/triton \
    HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility VK_PORT=8000
USER 10001:10001
WORKDIR /tmp
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=600s CMD ["vk-model", "--health"]

ARG VERSION=unknown
ARG COMMIT=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="vk" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENTRYPOINT ["vk"]
CMD ["--help"]
