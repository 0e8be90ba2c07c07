# A worker on NVIDIA GPUs: TensorRT from its Python package on NVIDIA's CUDA runtime image. Build from
# the repository's root:
#   docker build -f docker/worker-gpu.Dockerfile -t trtq-worker-gpu .
# `--build-arg EXTRA=tensorrt-rtx` or `tensorrt-lean` takes another flavour (docs/gpu.md).

# PyCUDA is compiled, so the first stage has CUDA's headers and a compiler.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
ARG EXTRA=gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY producer ./producer
COPY workers ./workers
RUN python3 -m venv /opt/trtq \
    && /opt/trtq/bin/pip install --no-cache-dir ".[${EXTRA},cpu,metrics,bulk]" 'cuda-bindings>=13,<14'

FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --no-log-init --create-home --uid 10001 trtq \
    && install -d -o trtq -g trtq /data /var/cache/trtq
COPY --from=build /opt/trtq /opt/trtq
COPY configs /srv/trtq/configs
COPY docker/healthcheck.py /srv/trtq/docker/healthcheck.py
ENV PATH=/opt/trtq/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRTQ_METRICS_PORT=9461 TRTQ_PLAN_CACHE=/var/cache/trtq
USER 10001
WORKDIR /srv/trtq
EXPOSE 9461
STOPSIGNAL SIGTERM
# Plans that are not in the cache are built before the first task: minutes for a large model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "/srv/trtq/docker/healthcheck.py", "http://127.0.0.1:9461/readyz"]
CMD ["trtq", "worker", "--devices", "all"]
