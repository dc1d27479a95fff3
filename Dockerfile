# The server on a CPU. docs/install.md has the commands.
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE NOTICE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# the CPU build of PyTorch: without it, pip installs the CUDA build of several GB
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" \
        "$(echo /wheels/*.whl)[serve,structured]"

FROM python:3.12-slim-bookworm
# for an image with PyTorch for CUDA: Triton compiles with gcc at run time ("gcc libc6-dev")
ARG RUNTIME_PACKAGES=
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$RUNTIME_PACKAGES" ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends $RUNTIME_PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --uid 10001 --create-home quire && install --directory --owner quire /models
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
USER 10001
WORKDIR /models
VOLUME /models
EXPOSE 8000
# loading a large model takes minutes, in which failures are not counted
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["quire"]
CMD ["serve", "quire-tiny", "--host", "0.0.0.0"]
