#!/usr/bin/env bash
# From a fresh clone to a measured comparison on this machine. Options are those of the command `bench` (--help).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
preload
exec "$venv/bin/python" "$root/examples/quickstart.py" "$@"
