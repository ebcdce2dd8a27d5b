# An image that trains with swapkit on NVIDIA GPUs: torch's wheels bring CUDA, the host the driver.
#   docker build -t swapkit .
#   docker run --gpus all --rm -v "$PWD:/work" swapkit swapkit run --budget 10GiB train.py
FROM python:3.12-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# The shim is compiled for the installed torch here: the image that trains has no compiler.
ENV XDG_CACHE_HOME=/opt/cache
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir . \
    && /opt/venv/bin/swapkit build

FROM python:3.12-slim-bookworm
COPY --from=build /opt /opt
ENV PATH=/opt/venv/bin:$PATH XDG_CACHE_HOME=/opt/cache
RUN useradd --create-home trainer && chown -R trainer /opt/cache
USER trainer
WORKDIR /work
CMD ["swapkit", "doctor"]
