#!/usr/bin/env bash
# A quarter of an hour on a machine without internet, which has torch, Triton and pytest, in two calls: between them
# there is time to mend what the first one shows. What is brought there lies in the folder BROUGHT:
#   install.sh, part-*.tar.xz   vLLM and what it needs: `sh install.sh PART` unpacks one, `--finish` prints the variables
#   model.xz                    examples/demo/model/model.safetensors, where the checkout lacks it
#   bash tests/gpu/offline.sh 1 OUT     8 minutes: 20 s to unpack, 290 s of graph smoke, 120 s for a default start
#   bash tests/gpu/offline.sh 2 OUT     5 minutes: 20 s to unpack, 230 s of forced trace, then the smoke of MENDED
# OUT gets the report, its log and figures as JSON, at most eight files; models stay in a temporary folder.
set -uo pipefail
call=${1:?1 or 2} out=$(realpath -m "${2:-gpu-report}") brought=$(realpath "${BROUGHT:-.brought}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
minutes=8 site=${SITE:-/tmp/site} python=${PYTHON:-python3} dry_run=()
[[ $call == 1 ]] || minutes=5
[[ ${3:-} != --dry-run ]] || dry_run=(--dry-run)
mkdir -p "$out"
log=$out/report.md.log

# unpack: vLLM, the model and this package, without pip: a copy of the package, and the entry point by which vLLM finds it.
unpack() {
    local weights=examples/demo/model/model.safetensors info=$site/vllm_specplugins-0.dist-info
    export SITE=$site
    sh "$brought/install.sh" "$brought"/part-*.tar.xz && eval "$(sh "$brought/install.sh" --finish)"
    [[ -e $weights ]] || "$python" -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' "$brought/model.xz" "$weights"
    cp -rp vllm_specplugins "$site" && cp -rp kernels "$site/vllm_specplugins/kernels" && mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm-specplugins\nVersion: 0+copied\n' >"$info/METADATA"
    printf '[vllm.general_plugins]\nspecplugins = vllm_specplugins:register\n' >"$info/entry_points.txt"
}

unpack >>"$log" 2>&1 || echo "Not all could be unpacked; the calls go on with what is there." | tee -a "$log"
# Numba's functions, in 40 s, beside the first engine's start, which waits for the GPU.
[[ -n ${dry_run[*]} ]] || CUDA_VISIBLE_DEVICES= "$python" tests/gpu/imports.py >>"$log" 2>&1 &
export TMPDIR=$(mktemp -d) CALL=$call SPENT=$SECONDS SKIP_INSTALL=1
export MODELS=$TMPDIR/models
mkdir "$MODELS"

# Figures, and the logs of engines that did not start.
bring_back() {
    cp "$MODELS"/*-bench.json "$out"
    tail -n 300 "$TMPDIR"/specplugins-*/*.log >>"$log"
    kill $(jobs -p)
    rm -rf "$TMPDIR"
}
trap 'bring_back 2>/dev/null' EXIT
if [[ -n ${dry_run[*]} ]]; then
    bash tests/gpu.sh --dry-run "$out/report.md"
else
    bash tests/gpu.sh "$minutes" "$out/report.md"
fi
