# Clients, `trtq exporter` and Flower: no engine. Build from the repository's root:
#   docker build -f docker/producer.Dockerfile -t trtq-producer .
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY producer ./producer
COPY workers ./workers
RUN python -m venv /opt/trtq && /opt/trtq/bin/pip install --no-cache-dir '.[metrics,flower]'

FROM python:3.12.11-slim-bookworm
RUN useradd --no-log-init --create-home --uid 10001 trtq
COPY --from=build /opt/trtq /opt/trtq
COPY configs /srv/trtq/configs
COPY docker/healthcheck.py /srv/trtq/docker/healthcheck.py
ENV PATH=/opt/trtq/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /srv/trtq
EXPOSE 9460
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "/srv/trtq/docker/healthcheck.py", "http://127.0.0.1:9460/metrics"]
CMD ["trtq", "exporter", "--host=0.0.0.0", "--port=9460"]
