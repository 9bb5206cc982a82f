# The stock baseline: the same server over transformers' own generate, with the kernels it can use.
# It builds on the vk image, so both arms have the same Python, torch, transformers and server.
ARG BASE_IMAGE=finalbench/vk:0.1.0
FROM ${BASE_IMAGE}

# transformers takes these by itself when they are there. Empty for a CPU.
ARG STOCK_KERNELS="flash-linear-attention causal-conv1d"
ARG PIP_ARGUMENTS=""
USER 0:0
RUN if [ -n "${STOCK_KERNELS}" ]; then \
      /opt/venv/bin/pip install ${PIP_ARGUMENTS} -c /opt/engine/constraints.txt ${STOCK_KERNELS}; \
    fi
USER 10001:10001
ENV VK_PROFILE=stock
LABEL org.opencontainers.image.title="stock"
ENTRYPOINT ["vk"]
CMD ["--help"]
