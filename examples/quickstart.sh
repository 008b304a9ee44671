#!/usr/bin/env bash
# From a fresh clone to a measured comparison on this machine. `--help` lists the options.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
preload
exec "$venv/bin/python" "$root/examples/quickstart.py" "$@"
