#!/usr/bin/env bash
# One program for a GPU that is there for half an hour: a Markdown report, written as it goes.
#   bash tests/gpu.sh [--minutes 25] [--out gpu-report.md]     options: those of tests/gpu/report.py
# SKIP_INSTALL=1 takes the `python` that is there, with vLLM and this package in it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=python3
if [[ -z ${SKIP_INSTALL:-} ]]; then
    source "$here/../examples/environment.sh"
    python=$venv/bin/python
fi
exec "$python" "$here/gpu/report.py" "$@"
