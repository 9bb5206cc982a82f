# An official image of another engine with our labels and nowhere to write but /tmp and /cache.
# What it is started with is data: containers/images.yaml.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

ARG PEER
ENV HOME=/tmp HF_HOME=/cache HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /tmp
LABEL io.finalbench.peer="${PEER}"
