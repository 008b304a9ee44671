#!/usr/bin/env bash
# Starts vLLM's OpenAI-compatible server with prompt_lookup and a small chat model (chat_model.py; the demo model where it
# cannot be had), sends it one request, shows what was drafted and accepted, and stops it. With --keep it stays up. PORT
# chooses the port (a free one otherwise).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case ${1:-} in
    "" | --keep) ;;
    *) fail "the only option is --keep, not $1." ;;
esac
command -v curl >/dev/null || fail "curl is not there; install it to send the request."

port=${PORT:-$("$venv/bin/python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')}
url=http://127.0.0.1:$port
log=$root/.cache/serve.log
model=$("$venv/bin/python" "$root/examples/chat_model.py") || model=$root/examples/demo/model
options=(--host 127.0.0.1 --port "$port" --served-model-name "$(basename "$model")" --max-model-len 2048
    --speculative-config '{"method":"prompt_lookup"}')
if [[ $gpu == none ]]; then
    options+=(--dtype float32 --enforce-eager)
    export VLLM_CPU_KVCACHE_SPACE=1 # GiB
fi
mkdir -p "$root/.cache"

fetch() { curl --silent --fail --noproxy '*' --max-time 120 "$@"; }

# The server and its worker processes are one process group, which `stop` ends as a whole.
stop() {
    kill -TERM -- "-$server" 2>/dev/null || return 0
    for _ in {1..60}; do
        kill -0 -- "-$server" 2>/dev/null || return 0
        sleep 0.5
    done
    kill -KILL -- "-$server" 2>/dev/null || true
}

set -m
(preload && exec "$venv/bin/vllm" serve "$model" "${options[@]}") >"$log" 2>&1 </dev/null &
server=$!
set +m
trap stop EXIT
trap 'exit 130' INT TERM

echo "Starting the server at $url (its log is $log) ..."
began=$SECONDS
until fetch "$url/health" >/dev/null; do
    if ! kill -0 "$server" 2>/dev/null || ((SECONDS - began > 1800)); then
        tail -n 30 "$log" >&2
        fail "the server did not start."
    fi
    sleep 1
    if (((SECONDS - began) % 20 == 0)); then
        echo "$((SECONDS - began)) s so far: $(tail -n 1 "$log" | sed 's/.*\] //' | cut -c1-100)"
    fi
done

echo "Ready after $((SECONDS - began)) s. Asking $(basename "$model") to extract JSON from a text:"
"$venv/bin/python" -c '
import json, sys
row = next(row for row in map(json.loads, open(sys.argv[1])) if row["task"] == "extraction")
print(json.dumps({"model": sys.argv[2], "messages": row["messages"], "max_tokens": 160, "temperature": 0}))
' "$root/vllm_specplugins/tools/bench/prompts.jsonl" "$(basename "$model")" |
    fetch "$url/v1/chat/completions" --header 'Content-Type: application/json' --data @- |
    "$venv/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])'

metrics() { fetch "$url/metrics"; }
sleep 1 # the last step's come when the engine has fallen idle
metrics | "$venv/bin/python" -c '
import re, sys
text = sys.stdin.read()
def count(name):
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))
tokens = count("generation_tokens_total")
drafted, accepted = (count(f"spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted"))
steps = tokens - accepted # each accepted token saves one
print(f"{tokens:.0f} tokens in {steps:.0f} steps: {tokens / steps:.1f} tokens per step,"
      f" {100 * accepted / max(drafted, 1):.0f} % of drafts accepted")
'
echo "Some of the server's counters (docs/operating.md describes them, examples/grafana.json shows them):"
metrics | grep -E '^vllm:(spec_decode_num_(drafts|draft_tokens|accepted_tokens)|generation_tokens)_total'
metrics | grep -E '^vllm:specplugins_(num_drafts|drafted_tokens|num_draft_tokens|num_accepted_tokens|faults)_total\{'

if [[ ${1:-} == --keep ]]; then
    trap - EXIT
    echo "The server stays up; stop it with: kill $server"
fi
