#!/usr/bin/env bash
# In place of Python in a dry run of tests/gpu.sh: a program prints a line, fails, hangs, prints nothing, or does not
# even end when it is interrupted.
case "$*" in
*imports.py*) exec "${PYTHON:-python3}" "$@" ;;
*start.py*null*) echo "120 s, 1000 KV blocks" ;;
*start.py*ngram*) exit 3 ;;
*start.py*) echo "the first line"; sleep 60 ;;
*smoke.py*) trap '' INT; echo "jump failed after 9 s: TypeError: planted"; for _ in {1..60}; do sleep 1; done ;;
*"bench "*edit*) ;;
*"bench "*) echo "a traceback" >&2; exit 1 ;;
*forced_trace.py*--drafter*) echo "an engine failed"; exit 2 ;;
*forced_trace.py*" --output-len 96"*\]}}) # of a call, all arms
    mkdir -p "$TMPDIR/specplugins-x" && echo "the engine's log" >"$TMPDIR/specplugins-x/engine-1.log"
    exit 2 ;;
*forced_trace.py*)
    all=$*
    folder=${all#*--folder }
    echo '{}' >"${folder%% *}/llama-3.1-8b-bench.json" 2>/dev/null
    echo "* prompt_lookup, 8 at a time: 2.700 tokens a step; replay 2.690" ;;
*identity*) echo "23 passed, 1 failed in 99 s"; exit 1 ;;
*-V*) echo "Python 0, of a dry run" ;;
*) echo "done" ;;
esac
