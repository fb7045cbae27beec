#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows on a newer GPU, in under nine minutes, what emulation can show of the Turing and Volta cards.
#
#   OUT=results COMMIT=$(git rev-parse HEAD) tests/gpu/run_emulated.sh [names of runs]
#
# Needs upstream's CUDA build of vLLM with this project joined to it.
set -u
cd "$(dirname "$0")/../.." || exit 2
: "${OUT:?set OUT to a folder for the results}"
: "${COMMIT:?set COMMIT to what is measured}"
export VLLM_WORKER_MULTIPROC_METHOD=spawn
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 no_proxy=127.0.0.1
if ! python3 -c "import pynvml" 2>/dev/null; then
    # nvidia-ml-py is a dependency of the project; upstream carries a copy.
    site=$(mktemp -d)
    python3 - "$site" <<'PY'
import importlib.util
import pathlib
import shutil
import sys

(vllm, *_) = importlib.util.find_spec("vllm").submodule_search_locations
shutil.copy(pathlib.Path(vllm, "third_party", "pynvml.py"), sys.argv[1])
PY
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
only=()
[ $# -eq 0 ] || only=(--only "$@")
exec timeout 535 python3 benchmarks/emulated_serve.py \
    --out "$OUT" --commit "$COMMIT" --seconds 500 "${only[@]}"
