"""Runs the kernel check in the front process: reads its environment variable and the shapes to check.

VLLM_SPECPLUGINS_SELF_CHECK: "0" skips the check; "only" prints the result and exits before the engine starts.
"""

import os
import sys
from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_specplugins.config import ConfigError
from vllm_specplugins.kernels.self_check import Shapes, check_device

VARIABLE, _VALUES = "VLLM_SPECPLUGINS_SELF_CHECK", ("0", "1", "only")


def stop_if_only(vllm_config: Any) -> None:
    """With "only", checks the kernels and exits, with status 1 if a kernel differs, otherwise 0.

    Raises:
        ConfigError: if the variable has an invalid value.
    """
    if value() != "only":
        return
    on = device()
    if on is None:
        sys.stdout.write("self-check: a CPU runs the references, so there is nothing to check\n")
        sys.exit(0)
    problems = 0
    for finding in check_device(on, shapes_of(vllm_config)):
        problems += bool(finding.problem)
        sys.stdout.write(f"self-check: {finding.name}: {finding.problem or 'passed'}\n")
    sys.exit(1 if problems else 0)


def shapes_of(vllm_config: Any) -> Shapes:
    config, model_config = vllm_config.speculative_config, vllm_config.model_config
    counts = (model_config.get_num_attention_heads, model_config.get_num_kv_heads)
    heads = *(count(vllm_config.parallel_config) for count in counts), model_config.get_head_size()
    return Shapes(
        vocab_size=model_config.get_vocab_size(),
        dtype=model_config.head_dtype,
        max_num_draft=vllm_config.num_speculative_tokens,
        samples=config.draft_sample_method == "probabilistic",
        looks_up=config.use_ngram(),
        trims=config.enable_adaptive_verification,
        heads=heads if config.plan.branches else None,
        runs_target=config.runs_target,
        cascades=config.plan.on_device and bool(config.plugin_config.stages),
        num_slots=vllm_config.scheduler_config.max_num_seqs,
    )


def value() -> str:
    value = os.environ.get(VARIABLE, "1")
    if value not in _VALUES:
        raise ConfigError(f"{VARIABLE} must be {', '.join(_VALUES[:-1])} or {_VALUES[-1]}, not {value!r}.")
    return value


def device() -> torch.device | None:
    """Returns the device that runs the kernels; None for a CPU, which runs the references."""
    name = current_platform.device_type
    return None if name == "cpu" else torch.device(name)
