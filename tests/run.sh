#!/usr/bin/env bash
# Everything that CI checks, the quick things first; stops at the first failure. PYTHON chooses the interpreter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
cd "$root"
PATH=$venv/bin:$PATH

check() {
    local began=$SECONDS
    echo "== $*"
    "$@" || fail "failed after $((SECONDS - began)) s: $*"
    echo "== $((SECONDS - began)) s"
}

check ruff check
check ruff format --check
check mypy
preload
check pytest -q tests --ignore tests/engine -m "not gpu"
# Both runners' engine tests at once, on a core each where there are two: their models are tiny, and V2's interpreter
# is a single thread.
cores=$(nproc)
engine_tests() {
    local runner=$1 core=$2 bind=()
    ((cores < 2)) || bind=(OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND="$core")
    exec env "${bind[@]}" SPECPLUGINS_RUNNER="$runner" pytest -q tests/engine -m "not gpu"
}
v2_output=$(mktemp)
(engine_tests v2 1) >"$v2_output" 2>&1 &
v2=$!
trap 'kill $v2 2>/dev/null || true; rm -f "$v2_output"' EXIT
echo "== engine tests on V1, and beside them on V2"
(engine_tests v1 0) || fail "engine tests failed on V1"
wait $v2 && v2_status=0 || v2_status=$?
cat "$v2_output"
((v2_status == 0)) || fail "engine tests failed on V2"
echo "All checks passed in $SECONDS s."
