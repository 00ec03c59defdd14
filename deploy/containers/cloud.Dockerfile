# syntax=docker/dockerfile:1
# The verifier, for CUDA and CPU: torch's wheels bring CUDA's libraries, the host brings the driver.
# docker build -f deploy/containers/cloud.Dockerfile -t outrider-verifier:0.1.0 .
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY outrider outrider
COPY common common
COPY cloud_verifier cloud_verifier
COPY edge_client edge_client
COPY kernels kernels
COPY models/__init__.py models/__init__.py
COPY models/embedded models/embedded
RUN python -m venv /opt/outrider && /opt/outrider/bin/pip install --no-cache-dir --constraint constraints.txt '.[cloud,edge,structured]'

FROM python:3.12.11-slim-bookworm
# Triton compiles the launchers of its kernels when it first runs them.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/outrider /opt/outrider
COPY deploy/containers/check_verifier.py /opt/outrider/check_verifier.py
ENV PATH=/opt/outrider/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    NUMBA_CACHE_DIR=/var/cache/outrider \
    TRITON_CACHE_DIR=/var/cache/outrider/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN install -d -o 65532 -g 65532 /var/cache/outrider
USER 65532:65532
EXPOSE 7077 7078
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["/opt/outrider/bin/python", "/opt/outrider/check_verifier.py"]
ENTRYPOINT ["cloud-verifier"]
CMD ["serve", "--probe-listen", "127.0.0.1:7076"]
