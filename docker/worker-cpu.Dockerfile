# A worker on the CPU. Build from the repository's root:
#   docker build -f docker/worker-cpu.Dockerfile -t trtq-worker-cpu .
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY producer ./producer
COPY workers ./workers
RUN python -m venv /opt/trtq && /opt/trtq/bin/pip install --no-cache-dir '.[cpu,metrics,bulk]'

FROM python:3.12.11-slim-bookworm
# /data is for bulk jobs: a volume mounted there takes over its owner.
RUN useradd --no-log-init --create-home --uid 10001 trtq && install -d -o trtq -g trtq /data
COPY --from=build /opt/trtq /opt/trtq
COPY configs /srv/trtq/configs
COPY docker/healthcheck.py /srv/trtq/docker/healthcheck.py
ENV PATH=/opt/trtq/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    TRTQ_METRICS_PORT=9461
USER 10001
WORKDIR /srv/trtq
EXPOSE 9461
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "/srv/trtq/docker/healthcheck.py", "http://127.0.0.1:9461/readyz"]
CMD ["trtq", "worker", "--devices", "cpu"]
