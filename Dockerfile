# An image that serves bundles with `stagepack serve`. For Triton's own image see docs/how-to/deploy.md.
#
# Build it for one runtime:
#
#     docker build -t stagepack .                                    # torch from the default index: GPUs and CPU
#     docker build -t stagepack --build-arg TORCH_INDEX=URL .        # torch from another index, such as that of the CPU builds, which are
#                                                                    # much smaller; the install page of pytorch.org gives the URL
#     docker build -t stagepack --build-arg RUNTIME=onnxruntime .    # ONNX Runtime on the CPU, without torch
#     docker build -t stagepack --build-arg EXTRAS=sign,remote .     # with signatures, and with bundles at a URL
#
# Run it with the bundle mounted read-only; arguments are those of `stagepack serve`:
#
#     docker run --rm -p 8000:8000 -p 8001:8001 -v "$PWD/minilm.stagepack:/models/minilm.stagepack:ro" stagepack /models/minilm.stagepack
#     docker run --gpus all ... stagepack /models/minilm.stagepack --device cuda:0 --device cuda:1
FROM python:3.12-slim

# The runtime of the stages: torch or onnxruntime.
ARG RUNTIME=torch
# The package index that torch is installed from; empty means the default index.
ARG TORCH_INDEX=
# Further extras of pyproject.toml, separated by commas; empty means none.
ARG EXTRAS=

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY stagepack stagepack
COPY loaders loaders

# Another index has torch, but not the constrained versions of its dependencies: these follow from the default index.
RUN if [ "$RUNTIME" = torch ] && [ -n "$TORCH_INDEX" ]; then \
        pip install --no-cache-dir --constraint constraints.txt --no-deps --index-url "$TORCH_INDEX" torch; \
    fi \
    && pip install --no-cache-dir --constraint constraints.txt ".[$RUNTIME,serve${EXTRAS:+,$EXTRAS}]" \
    && useradd --system --uid 10001 stagepack

# By number: Kubernetes cannot tell from a name that a user is not root (`runAsNonRoot: true`).
USER 10001
WORKDIR /models
EXPOSE 8000 8001

# Listen on all addresses of the container; the host publishes the ports that it wants.
ENTRYPOINT ["stagepack", "serve", "--host", "0.0.0.0"]
