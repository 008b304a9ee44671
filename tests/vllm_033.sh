#!/usr/bin/env bash
# Engine tests on vLLM 0.33.0, of which there is no build for CPUs: its Python over 0.32.0's compiled CPU code.
#   bash tests/vllm_033.sh                     a few of them, as CI runs them
#   bash tests/vllm_033.sh v1 [ARGUMENTS]      all of a runner's, or what the arguments say to pytest; v2 likewise
# The overlay stays in .cache/. Where vLLM's wheel cannot be downloaded, a sentence says so, and nothing is tested.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
cd "$root"
version=0.33.0
overlay=$root/.cache/vllm-$version+cpu

make_overlay() {
    local work=$root/.cache/vllm-$version.part installed library
    rm -rf "$work" "$overlay"
    mkdir -p "$work"
    installed=$("$venv/bin/python" -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0])')
    "$venv/bin/python" -m pip download -q --no-deps --only-binary=:all: --platform=manylinux_2_28_x86_64 \
        --python-version=3.12 -d "$work" "vllm==$version" &>"$work/log" || return 1
    "$venv/bin/python" -m zipfile -e "$work"/vllm-*.whl "$work/unpacked"
    "$venv/bin/python" -m pip install -q --no-deps --target "$work/overlay" 'orjson>=3.11.6' \
        triton==3.8.0 &>>"$work/log" || return 1 # what its torch 2.14 pins
    mv "$work/unpacked/vllm" "$work/overlay/vllm"
    find "$work/overlay/vllm" -name '*.so' -delete # compiled for CUDA
    for library in _C _C_AVX2 _C_AVX512 fs_io_C spinloop; do
        ln -s "$installed/$library.abi3.so" "$work/overlay/vllm/"
    done
    mkdir "$work/overlay/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
        >"$work/overlay/vllm-$version+cpu.dist-info/METADATA"
    mv "$work/overlay" "$overlay"
    rm -rf "$work"
}

[[ $gpu == none ]] || fail "vLLM $version is tested with the pip that installs it where there is a GPU."
if [[ ! -d $overlay/triton ]] && ! make_overlay; then
    echo "vLLM $version cannot be downloaded here, so nothing is tested on it."
    exit 0
fi

unset PYTHONDONTWRITEBYTECODE # or else each process compiles vLLM anew
preload
export PYTHONPATH=$overlay${PYTHONPATH:+:$PYTHONPATH}
run() { # RUNNER ARGUMENTS
    echo "== vLLM $version, Model Runner ${1^^}"
    SPECPLUGINS_RUNNER=$1 "$venv/bin/pytest" -q -m "not gpu" "${@:2}"
}
if (($#)); then
    runner=$1
    shift
    if (($#)); then run "$runner" "$@"; else run "$runner" tests/engine; fi
    exit
fi
engine=tests/engine
run v1 $engine/test_plugin.py $engine/test_identity.py $engine/test_server.py \
    -k "passes or scheduling or stays or batches or tool_calls"
# In a process of their own: what they import, vLLM cannot start an engine behind.
run v1 $engine/test_compat.py::test_installed_version $engine/test_vllm_names.py $engine/test_server_defaults.py \
    -k "version or listed or seen or starts"
run v1 $engine/test_masks.py $engine/test_streams.py
run v2 $engine/test_invariants.py $engine/test_masks.py $engine/test_built_in.py::test_heads_keep_in_step \
    -k "exit_of_all and asynchronous or short_masks or heads and not eagle3"
