#!/usr/bin/env bash
# What a GPU is wanted for, in the order of what would be missed most: a Markdown report, written as it goes.
#   bash tests/gpu.sh [MINUTES [REPORT]]     40 minutes, gpu-report.md; what programs log goes beside it
#   bash tests/gpu.sh 15 [REPORT]            up to 15: the parts of the two calls of tests/gpu/offline.sh
#   bash tests/gpu.sh --dry-run REPORT       no GPU: the same parts, of programs that fail, hang or print nothing
# One engine at a time, each part with a limit of its own. No part that fails or hangs ends another one; what no time is
# left for is listed as not run, and a table at the end says what became of each part, however the script ends. Send the
# report: docs/support.md shows what has not run yet. CALL=1 or CALL=2 runs the parts of one call; MENDED is a pattern of
# the graph smoke's tests that call 2 runs, too; SPENT is how many of the seconds have passed. PARTS='Steps|Identity' runs the parts whose titles match;
# SKIP_INSTALL=1 takes the `python3` that is there; MODEL is measured in place of the demo model, widened to 3.6 B
# parameters; LOG, of token ids below 128,256, is what engines are forced to emit.
set +e -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dry_run= python=python3 patience=20
if [[ ${1:-} == --dry-run ]]; then
    dry_run=1 python=tests/gpu/dry_run.sh patience=1
    shift
    set -- 10 "${1:?the report is missing}"
fi
report=${2:-gpu-report.md} ends=$((SECONDS + 60 * ${1:-40} - ${SPENT:-0}))
models=${MODELS:-$report.models} call=${CALL:-}
[[ -n $call || -n $dry_run ]] || ((${1:-40} > 15)) || call=12
title= command= began=0 program= output= became=
export SPECPLUGINS_RUNNER=v2 VLLM_USE_V2_MODEL_RUNNER=1 VLLM_NO_USAGE_STATS=1
outcomes=()

say() { printf '%s\n' "$@" | tee -a "$report"; }

# end_part WORDS: writes down what the part's program printed, of pytest's lines those that tell, and what became of it.
end_part() {
    local became=$1 telling=.
    [[ $command != "-P -m pytest "* ]] || telling='^(FAILED|ERROR|SKIPPED|PASSED)|\b(passed|failed|skipped|deselected)\b.* in '
    grep -E "$telling" "$output" | cut -c1-400 | tee -a "$report"
    ((PIPESTATUS[0] == 0)) || became+=", and printed nothing"
    say '```' "$became"
    outcomes+=("| $title | $became | $((SECONDS - began)) |")
    title=
}

# part TITLE SECONDS COMMAND...: a Python program with a limit, which is interrupted, so that it still says what it
# knows, and killed later.
part() {
    local limit=$2 left=$((ends - SECONDS)) status
    became=done
    [[ $1 =~ ${PARTS:-.} ]] || return 0
    title=$1 command=${*:3} began=$SECONDS
    say "" "## $title" "" "\`python $command\`" "" '```'
    : >"$output"
    if ((left < (dry_run ? 1 : 30))); then
        end_part "not run, no time was left"
        return
    fi
    ((limit < left)) || limit=$left
    [[ -z $dry_run || $title == Imports ]] || limit=2
    # Programs of the background ignore interrupts; this script waits, so that it hears when it shall end.
    timeout --signal=INT --kill-after="$patience" "$limit" env --default-signal=INT "$python" "${@:3}" \
        2>>"$report.log" </dev/null >"$output" &
    program=$!
    wait "$program"
    status=$?
    ((status == 0)) || became="exit status $status"
    [[ $status != 124 && $status != 137 ]] || became="out of time after $limit s"
    end_part "$became"
}

# Whatever ends the script, the summary is there.
summary() {
    [[ -z $title ]] || end_part "the script was ended"
    say "" "## Summary" "" "| part | what became of it | s |" "|---|---|---|" "${outcomes[@]}" \
        "" "$((SECONDS / 60)) minutes in all."
    rm -f "$output"
}

: >"$report"
output=$report.part # beside the report, so that it is there whatever ends this script
trap summary EXIT
trap 'kill "$program" 2>/dev/null; exit 130' INT TERM HUP
say "# On a GPU" "" "* $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo none)" \
    "* $(nproc) CPU cores, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
if [[ -z ${SKIP_INSTALL:-}$dry_run ]]; then
    if bash examples/environment.sh 2>>"$report.log"; then
        python=.venv/bin/python
    else
        say "* Nothing could be installed; the python3 that is there goes on."
    fi
fi
say "* $("$python" -V 2>&1), $("$python" -m pip list --format=freeze 2>/dev/null | grep -E '^(vllm|torch|triton)==' | xargs)"

# -P: the folder that this runs in is not where the package is.
pytest=(-P -m pytest -q -rA -p no:cacheprovider)
lookup='{"method": "prompt_lookup"}'
exit='{"method": "early_exit", "exit_layer": 2, "num_speculative_tokens": 4}'
cascade="{\"method\": \"cascade\", \"stages\": [$lookup, $exit]}"
ngram='{"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 8, "num_speculative_tokens"'

# default_start SHAPE CONFIG: a start with vLLM's defaults, of dummy weights.
default_start() {
    part "Default start: $1, $2" 240 tests/gpu/start.py "$2" --shape "$1" --folder "$models" --plain "$report.$1.json"
}

# forced_trace WORDS SECONDS OPTIONS...: engines of dummy weights are forced to emit a log.
forced_trace() {
    part "Forced trace: llama-3.1-8b$1" "$2" tests/gpu/forced_trace.py --shape llama-3.1-8b --folder "$models" \
        ${LOG:+--log "$LOG"} "${@:3}"
}

# In a dry run, with every package missing that the machine without internet lacks.
imports() {
    [[ -z $dry_run ]] || part "Imports" 300 tests/gpu/imports.py --lacking
}

# 8 minutes: the smoke's first engine takes 45 s, each other one 15 to 22; the start takes 120 s.
first_call() {
    imports
    part "Graph smoke" 290 tests/gpu/smoke.py
    default_start qwen3-8b "$lookup"
}

# 5 minutes: 230 s of trace (45 s for each engine, 75 s at one request, 15 s at 32), then what time is left for. No engine
# compiles its model, which would take 40 s each.
second_call() {
    local config='{"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes":'
    config+=' [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512]}}'
    local quick=(--rate "" --rounds 1 --output-len 96 --engine-args "$config")
    imports
    forced_trace "" 240 --batch 32,1 "${quick[@]}"
    # An engine that does not start ends the trace: the other arm is tried by itself.
    [[ $became == done ]] || forced_trace ", prompt_lookup alone" 150 --batch 32,1 "${quick[@]}" --methods prompt_lookup
    [[ -z ${MENDED:-} ]] || part "Graph smoke: $MENDED" 60 tests/gpu/smoke.py "$MENDED"
    ((ends - SECONDS < 70)) || forced_trace ", 15 drafts" 90 --batch 32 "${quick[@]}" --methods ngram_gpu:15
}

everything() {
    local config workload
    for config in null "$lookup" "$ngram: 31}"; do default_start qwen3-8b "$config"; done
    part "Graph smoke" 480 tests/gpu/smoke.py
    model=${MODEL:-gpu-report-model}
    [[ -d $model ]] || part "Model to measure" 240 examples/demo/widen.py examples/demo/model "$model" \
        --hidden-factor 16 --intermediate 14336 --depth-factor 2 --device cuda --unchecked
    for workload in edit chat; do
        part "Speed: $workload" 900 -P -m vllm_specplugins bench --model "$model" --workloads $workload \
            --max-concurrency 1,8,32,64 --temperature 0,0.7 --rounds 3 --output-len 256 \
            --methods "$lookup" "$ngram: 5}" "$ngram: 31}" "$cascade" "$exit"
    done
    forced_trace "" 420
    forced_trace ", a head of EAGLE-3's shape" 420 --drafter
    part "Identity" 360 "${pytest[@]}" -m gpu tests/engine/test_gpu.py -k identity
    VLLM_BATCH_INVARIANT=1 part "In bfloat16, VLLM_BATCH_INVARIANT=1" 240 "${pytest[@]}" -m gpu \
        tests/engine/test_gpu.py -k invariant
    part "Sampled distribution" 360 "${pytest[@]}" -m gpu tests/engine/test_gpu.py -k "not identity"
    part "Kernels: verification at K = 31" 120 benchmarks/bench_kernels.py verification --requests 1 8 64 \
        --drafts 31 --repeats 20
    part "Kernels: lookup" 90 benchmarks/bench_kernels.py lookup
    part "Kernels: self-check" 90 -P -m vllm_specplugins doctor
    for config in null "$lookup"; do default_start llama-3.1-8b "$config"; done
    part "Kernels: tests" 400 "${pytest[@]}" tests/kernels
}

[[ $call != *1* ]] || first_call
[[ $call != *2* ]] || second_call
[[ -n $call ]] || everything
