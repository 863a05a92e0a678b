# A server for bundles:
#
#     docker build -t stagepack .                                      # torch, on GPUs and on the CPU
#     docker build -t stagepack --build-arg TORCH_INDEX=URL .          # torch from another index: that of the much smaller CPU builds, which
#                                                                      # the install page of pytorch.org names
#     docker build -t stagepack --build-arg RUNTIME=onnxruntime .      # ONNX Runtime on the CPU, without torch
#
#     docker run --rm -p 8000:8000 -p 8001:8001 -v "$PWD/minilm.stagepack:/models/minilm.stagepack:ro" stagepack /models/minilm.stagepack
#     docker run --gpus all ... stagepack /models/minilm.stagepack --device cuda:0 --device cuda:1
#
# It is the model server that runs in it, `stagepack serve`; for Triton's own image see docs/deploying.md.
FROM python:3.12-slim

# What runs the stages: torch or onnxruntime; and where torch comes from, if not from the usual index.
ARG RUNTIME=torch
ARG TORCH_INDEX=

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY stagepack stagepack
COPY loaders loaders

# torch comes first: resolved as a dependency of the rest, it would come from the usual index.
RUN if [ "$RUNTIME" = torch ]; then \
        pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch; \
    fi \
    && pip install --no-cache-dir --constraint constraints.txt ".[$RUNTIME,serve]" \
    && useradd --system stagepack

USER stagepack
WORKDIR /models
EXPOSE 8000 8001

# In a container the server listens to whoever reaches the container; ports are opened by whoever runs it.
ENTRYPOINT ["stagepack", "serve", "--host", "0.0.0.0"]
