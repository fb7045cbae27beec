#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs verification_graphs.py as a Turing card on a newer GPU, in under nine minutes.
#
#   OUT=results COMMIT=$(git rev-parse HEAD) tests/gpu/run_verification_graphs.sh [names of engines]
#
# Needs upstream's CUDA build of vLLM with this project joined to it.
set -u
cd "$(dirname "$0")/../.." || exit 2
: "${OUT:?set OUT to a folder for the results}"
: "${COMMIT:?set COMMIT to what is run}"
export VLLM_PRE_AMPERE_EMULATE=${VLLM_PRE_AMPERE_EMULATE:-7.5}
export VLLM_WORKER_MULTIPROC_METHOD=spawn HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
if ! python3 -c "import pynvml" 2>/dev/null; then
    # nvidia-ml-py is a dependency of the project; upstream carries a copy.
    vllm=$(python3 -c 'import importlib.util as u
print(u.find_spec("vllm").submodule_search_locations[0])')
    site=$(mktemp -d) && ln -s "$vllm/third_party/pynvml.py" "$site/pynvml.py"
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
only=()
[ $# -eq 0 ] || only=(--only "$@")
exec timeout 540 python3 tests/gpu/verification_graphs.py \
    --out "$OUT" --commit "$COMMIT" --seconds 500 "${only[@]}"
