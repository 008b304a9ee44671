# vLLM's server with this plugin. From a clone:
#   docker build -t vllm-specplugins .
#   docker run --gpus all --ipc host -p 8000:8000 -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
#       vllm-specplugins MODEL --speculative-config '{"method": "prompt_lookup"}'
# The entry point is vLLM's: `vllm serve`. --build-arg VLLM_VERSION=v0.33.0 chooses another supported version. The build
# needs no network: vLLM's image has setuptools and all that the plugin needs. The image holds Numba's machine code, for
# a read-only root file system and any user. --build-arg NUMBA_CPU=generic is for processors without AVX2, or not x86.
ARG VLLM_VERSION=v0.32.0
FROM vllm/vllm-openai:${VLLM_VERSION}
RUN --mount=type=bind,target=/src,rw \
    python3 -m pip install --no-cache-dir --no-index --no-build-isolation --no-deps /src
ARG NUMBA_CPU=x86-64-v3
ENV NUMBA_CPU_NAME=${NUMBA_CPU}
RUN python3 -c "import vllm_specplugins.gate.best_rate, vllm_specplugins.gate.budget, vllm_specplugins.gate.gate, \
    vllm_specplugins.gate.step_times, vllm_specplugins.gate.usual, vllm_specplugins.kernels.acceptance.host, \
    vllm_specplugins.kernels.budget.host, vllm_specplugins.kernels.history_match.host, \
    vllm_specplugins.kernels.rejection.host, vllm_specplugins.structures.suffix.drafts, \
    vllm_specplugins.structures.suffix.ring"
