# Inflight on Triton Server. The release must be 25.07 or later: earlier ones lack fixes for memory-safety faults in
# the HTTP and shared-memory handling. Build for a GPU with: --build-arg DEVICE=cuda
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:25.10-py3
FROM ${TRITON_IMAGE}

ARG DEVICE=cpu
ENV INFLIGHT_DEVICE=${DEVICE} \
    INFLIGHT_CACHE=/var/cache/inflight \
    INFLIGHT_VENV=/opt/inflight/.venv \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/inflight

# What set-up reads comes first, so that a change of the code does not install everything again.
COPY constraints.txt requirements.txt requirements-dev.txt requirements-no-deps.txt ./
COPY scripts/setup.sh scripts/embedded_server.py scripts/paths.py scripts/
RUN scripts/setup.sh

COPY pyproject.toml ./
COPY backend_engine backend_engine
COPY model_repository model_repository
COPY backends backends
COPY templates templates
COPY scripts scripts

RUN useradd --create-home --uid 1001 inflight \
    && mkdir -p /var/cache/inflight \
    && chown inflight /var/cache/inflight
USER inflight
VOLUME /var/cache/inflight

EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["/opt/inflight/.venv/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]

# Inside a container the ports must be reachable from outside it; docker-compose.yml publishes them on loopback.
ENTRYPOINT ["tini", "--", "scripts/serve.sh", "--host", "0.0.0.0", "--no-demo"]
