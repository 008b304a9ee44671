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
# Two lanes, on a core each where there are two: the quick tests, V1's engine tests, and a few on vLLM 0.33; V2's engine
# tests. The engines' models are tiny, and V2's interpreter is a single thread. Then a short soak.
cores=$(nproc)
on_core() { ((cores < 2)) || echo "OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=$1"; }
v1_lane() {
    # shellcheck disable=SC2046
    check env $(on_core 0) pytest -q tests --ignore tests/engine -m "not gpu"
    # shellcheck disable=SC2046
    check env $(on_core 0) SPECPLUGINS_RUNNER=v1 pytest -q tests/engine -m "not gpu"
    # shellcheck disable=SC2046
    check env $(on_core 0) bash tests/vllm_033.sh
}
v1_output=$(mktemp)
v1_lane >"$v1_output" 2>&1 &
v1=$!
trap 'kill $v1 2>/dev/null || true; rm -f "$v1_output"' EXIT
# shellcheck disable=SC2046
check env $(on_core 1) SPECPLUGINS_RUNNER=v2 pytest -q tests/engine -m "not gpu"
wait $v1 && status=0 || status=$?
cat "$v1_output"
((status == 0)) || fail "quick tests, or engine tests on V1 or on vLLM 0.33, failed"
check python tests/soak --minutes 10
echo "All checks passed in $SECONDS s."
