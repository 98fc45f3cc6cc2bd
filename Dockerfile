# sparsebench with its pinned versions, for a host with an NVIDIA GPU and the NVIDIA Container Toolkit.
#
#   docker build --tag sparsebench --build-arg COMMIT=$(git rev-parse HEAD) .
#   docker run --rm --gpus all --volume $PWD/runs:/bench/runs sparsebench run sparsity
#
# CUDA's libraries come with the wheels, the driver with the host.
FROM python:3.12-slim-trixie

# Triton compiles its launchers with the C compiler of the machine.
RUN apt-get update \
 && apt-get install --yes --quiet --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /source
COPY LICENSE README.md constraints.txt pyproject.toml setup.py ./
COPY formats formats
COPY harness harness
COPY kernels kernels
COPY reports reports
COPY results/*.py results/between_cards.json results/
COPY results/advice results/advice
COPY results/claims results/claims
COPY results/comparison results/comparison
COPY results/run results/run
COPY results/statistics results/statistics
COPY results/tables results/tables
COPY results/published results/published
COPY src/sparsebench/*.py src/sparsebench/py.typed src/sparsebench/
COPY src/sparsebench/vllm src/sparsebench/vllm
COPY suites suites
RUN pip install --no-cache-dir --constraint constraints.txt '.[gpu,parquet,models]'

# A run records the commit; there is no history in here.
ARG COMMIT
ENV SPARSEBENCH_COMMIT=$COMMIT
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /bench
ENTRYPOINT ["sparsebench"]
CMD ["doctor"]
