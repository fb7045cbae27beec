#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows on one GPU, in under eight minutes, what Triton on Turing's tensor cores computes and gains.
#
#   OUT=results COMMIT=$(git rev-parse HEAD) tests/gpu/run_triton_turing.sh
#
# Needs upstream's CUDA build of vLLM with this project joined to it. Writes triton_turing.json
# (kernels and launch configurations), triton_turing_engine.json (engines) and
# triton_turing_tests.json (the tests that need a GPU) into OUT. The engines' tokens are compared in
# float64 afterwards, on any machine:
#
#   python3 benchmarks/triton_turing_engine.py --judge results/triton_turing_engine.json
set -u
cd "$(dirname "$0")/../.."
: "${OUT:?set OUT to a folder for the results}"
: "${COMMIT:?set COMMIT to what is measured}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TRITON_DEFAULT_FP_FUSION=1
status=0
timeout 220 python3 benchmarks/triton_turing.py --out "$OUT" --commit "$COMMIT" --seconds 210 ||
    status=1
# The tests run while the engines start: nothing is timed then.
TRITON_CACHE_DIR=$(mktemp -d) timeout 200 python3 -m pytest -q -m gpu \
    tests/kernels/triton/test_turing_mma_gpu.py \
    tests/kernels/triton/test_batch_invariant_linear_gpu.py \
    --junit-xml "$OUT/triton_turing_tests.xml" >"$OUT/triton_turing_tests.log" 2>&1 &
tests=$!
timeout 260 python3 benchmarks/triton_turing_engine.py --out "$OUT" --commit "$COMMIT" \
    --seconds 250 || status=1
wait "$tests" || status=1
python3 benchmarks/recorded_tests.py "$OUT/triton_turing_tests.xml" "$OUT/triton_turing.json" ||
    status=1
tail -n 25 "$OUT/triton_turing_tests.log"
# Logs of processes that ended well say nothing more than the results.
rm -rf "$OUT"/triton_turing*/cache "$OUT"/triton_turing*/*.model "$OUT"/triton_turing_tests.xml
exit "$status"
