#!/usr/bin/env bash
# What a GPU is wanted for, in the order of what would be missed most: a Markdown report, written as it goes.
#   bash tests/gpu.sh [MINUTES [REPORT]]     25 minutes, gpu-report.md; what programs log goes beside it
# One engine at a time, each part with a limit of its own; what no time is left for is listed as not run. Send the
# report: docs/figures.md lists what nobody has run yet. SKIP_INSTALL=1 takes the `python` that is there; MODEL is
# served in place of the demo model, widened to 3.6 B parameters.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3
if [[ -z ${SKIP_INSTALL:-} ]]; then
    source examples/environment.sh
    python=$venv/bin/python
fi
export SPECPLUGINS_RUNNER=v2 VLLM_USE_V2_MODEL_RUNNER=1 VLLM_NO_USAGE_STATS=1
report=${2:-gpu-report.md} ends=$((SECONDS + 60 * ${1:-25}))

say() { printf '%s\n' "$@" | tee -a "$report"; }

# A Python program of at most four minutes; of pytest's lines those that tell.
run() {
    local left=$((ends - SECONDS)) telling=.
    ((left > 30)) || { say "Not run, no time was left."; return; }
    [[ $* != *pytest* ]] || telling='^(FAILED|ERROR)|\b(passed|failed|skipped)\b.* in '
    timeout --kill-after=10 $((left < 240 ? left : 240)) "$python" "$@" 2>>"$report.log" | grep -E "$telling" | cut -c1-240 |
        tee -a "$report"
    local status=${PIPESTATUS[0]}
    ((status == 0)) || say "exit status $status$([[ $status != 124 ]] || echo ' (out of time)')"
}

part() {
    say "" "## $1" "" "\`python ${*:2}\`" "" '```'
    run "${@:2}"
    say '```'
}

: >"$report"
say "# On a GPU" "" "* $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || echo none)" \
    "* $(nproc) CPU cores, $("$python" -V), commit $(git rev-parse --short HEAD)" \
    "* $("$python" -m pip list --format=freeze | grep -E '^(vllm|torch|triton)==' | xargs)"
model=${MODEL:-gpu-report-model}
[[ -d $model ]] || run examples/demo/widen.py examples/demo/model "$model" --hidden-factor 16 --intermediate 14336 \
    --depth-factor 2 --device cuda --unchecked

pytest=(-m pytest -q -p no:cacheprovider)
part Self-check -m vllm_specplugins doctor
part Identity "${pytest[@]}" -m gpu tests/engine/test_gpu.py -k identity
say "" "## Steps" "" "\`tests/gpu/steps.py\`, temperature 0, decoding alone. A cell: speed-up over no speculation; tokens a" \
    "step; ms a step of the engine's thread, and by the wall clock: medians over rounds." ""
exit='{"method": "early_exit", "exit_layer": 2, "num_speculative_tokens": 4}'
ngram='{"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 8, "num_speculative_tokens"'
for config in null '{"method": "prompt_lookup"}' "$ngram: 5}" "$ngram: 15}" "$ngram: 31}" \
    "{\"method\": \"cascade\", \"stages\": [{\"method\": \"prompt_lookup\"}, $exit]}" "$exit"; do
    run tests/gpu/steps.py "$config" --model "$model" --plain "$report.json"
done
part "Kernels: lookup" tests/bench/bench_history_match.py
part "Kernels: tests" "${pytest[@]}" tests/kernels
part "Sampled distribution" "${pytest[@]}" -m gpu tests/engine/test_gpu.py -k "not identity"
# Of docs/figures.md, "On a GPU": what never ran on one.
for name in medusa early_exit built_in exit_sampling jump adapters; do
    part "Never run: $name" "${pytest[@]}" "tests/engine/test_$name.py"
done
part "Kernels: verification" tests/bench/bench_rejection.py --requests 1 8 64 --drafts 4 --repeats 20
say "" "$((SECONDS / 60)) minutes in all."
