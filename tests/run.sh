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
for runner in v1 v2; do
    check env SPECPLUGINS_RUNNER=$runner pytest -q tests/engine -m "not gpu"
done
echo "All checks passed in $SECONDS s."
