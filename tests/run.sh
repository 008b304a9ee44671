#!/usr/bin/env bash
# Everything that CI checks, as jobs; stops at the first failure. PYTHON chooses the interpreter.
#   bash tests/run.sh          all of them, two at a time where there are two cores
#   bash tests/run.sh JOB...   these of them, one after the other
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
cd "$root"
export PATH=$venv/bin:$PATH
unset PYTHONDONTWRITEBYTECODE # a hundred processes would compile each what one of them has compiled
quick_python=PYTHONPATH=$root/tests/quick_python${PYTHONPATH:+:$PYTHONPATH} # but where times or memory are measured
preload

check() {
    local began=$SECONDS
    echo "== $*"
    "$@" || fail "failed after $((SECONDS - began)) s: $*"
    echo "== $((SECONDS - began)) s"
}

lint() { check ruff check && check ruff format --check && check mypy; }
quick() { check env "$quick_python" pytest -q --durations=25 tests --ignore tests/engine -m "not gpu"; }
v1() { check env "$quick_python" SPECPLUGINS_RUNNER=v1 pytest -q --durations=25 tests/engine -m "not gpu"; }
v2() { check env "$quick_python" SPECPLUGINS_RUNNER=v2 pytest -q --durations=25 tests/engine -m "not gpu"; }
# The arms of the methods that most users have; the others are measured by hand.
host() {
    check python benchmarks/bench_host_step.py --check --arms none ngram_gpu prompt_lookup "prompt_lookup, K = 0" \
        suffix_lookup cascade early_exit
}
vllm_033() { check env "$quick_python" bash tests/vllm_033.sh; }
soak() { check ${CORE:+taskset -c "$CORE"} python tests/soak --minutes 3.5 --method cascade; }

if (($#)); then
    [[ -z ${CORE:-} ]] || export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=$CORE
    for job; do "$job"; done
    exit
fi

# A job on the core CORE: its output when it ends. One that fails ends the other one, too.
run_job() {
    local output
    echo "== $1 begins"
    output=$(bash tests/run.sh "$1" 2>&1) && echo "$output" && return
    echo "$output"
    kill 0
}
export -f run_job
# The longest first, after the one that fails soonest. A core is enough for each: the engines' models are tiny, and
# V2's interpreter is a single thread.
set -m # a process group of their own
printf '%s\n' lint v1 v2 quick soak vllm_033 host |
    xargs -P $(($(nproc) < 2 ? 1 : 2)) --process-slot-var=CORE -I JOB bash -c "run_job JOB" &
trap 'kill -- -$(jobs -p) 2>/dev/null || true' EXIT
wait $! || fail "a job failed"
echo "All checks passed in $SECONDS s."
