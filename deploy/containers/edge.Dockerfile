# syntax=docker/dockerfile:1
# The edge: CPU, no torch.
# docker build -f deploy/containers/edge.Dockerfile -t outrider-edge:0.1.0 .
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY outrider outrider
COPY common common
COPY edge_client edge_client
COPY kernels kernels
COPY models/__init__.py models/__init__.py
COPY models/embedded/draft models/embedded/draft
RUN python -m venv /opt/outrider && /opt/outrider/bin/pip install --no-cache-dir --constraint constraints.txt '.[daemon,structured]'

FROM python:3.12.11-slim-bookworm
COPY --from=build /opt/outrider /opt/outrider
COPY deploy/containers/check_edge.py /opt/outrider/check_edge.py
ENV PATH=/opt/outrider/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
USER 65532:65532
EXPOSE 7079
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/opt/outrider/bin/python", "/opt/outrider/check_edge.py"]
ENTRYPOINT ["edge-client"]
CMD ["serve"]
