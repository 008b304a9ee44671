# vLLM's server with this plugin. From a clone:
#   docker build -t vllm-specplugins .
#   docker run --gpus all --ipc host -p 8000:8000 -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
#       vllm-specplugins MODEL --speculative-config '{"method": "prompt_lookup"}'
# The entry point is vLLM's: `vllm serve`. --build-arg VLLM_VERSION=v0.33.0 chooses another supported version. The build
# needs no network: vLLM's image has setuptools and all that the plugin needs.
ARG VLLM_VERSION=v0.32.0
FROM vllm/vllm-openai:${VLLM_VERSION}
RUN --mount=type=bind,target=/src,rw \
    python3 -m pip install --no-cache-dir --no-index --no-build-isolation --no-deps /src
