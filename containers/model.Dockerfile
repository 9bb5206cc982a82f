# One model over the vk image: `docker run --gpus all -p 8000:8000 vk-NAME` needs nothing more.
ARG BASE_IMAGE=finalbench/vk:0.1.0
FROM ${BASE_IMAGE}

ARG MODEL
ARG MODEL_SOURCE
ARG MODEL_REVISION=""
ARG MODEL_DRAFT=none
ENV VK_MODEL=${MODEL} VK_SOURCE=${MODEL_SOURCE} VK_REVISION=${MODEL_REVISION} VK_DRAFT=${MODEL_DRAFT}
LABEL org.opencontainers.image.title="vk-${MODEL}" \
      io.finalbench.model="${MODEL}" \
      io.finalbench.model.source="${MODEL_SOURCE}" \
      io.finalbench.model.revision="${MODEL_REVISION}"
ENTRYPOINT ["vk-model"]
CMD []
