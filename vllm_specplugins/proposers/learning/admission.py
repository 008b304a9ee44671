"""Refuses `learn`, before an engine loads anything, for parts that cannot be trained while the engine serves."""

from vllm_specplugins.config import ConfigError, EarlyExitConfig, JumpConfig, SpecConfig
from vllm_specplugins.proposers.heads.jump_head import JumpHead


def check_learning(config: SpecConfig, num_layers: int, tensor_parallel_size: int, has_adapters: bool) -> None:
    trained = [part.method_config for part in config.parts if getattr(part.method_config, "is_trained", False)]
    is_exit = any(isinstance(part, EarlyExitConfig) for part in trained)
    cases = {
        f"with tensor_parallel_size {tensor_parallel_size}": tensor_parallel_size > 1,
        "with enable_lora": has_adapters,
        "for early_exit in a cascade": bool(config.stages) and is_exit,
    }
    for case, is_given in cases.items():
        if is_given and trained:
            raise ConfigError(f"{config.method}: learn must be false {case}, not true.")
    for part in trained:
        if isinstance(part, EarlyExitConfig):
            _check_exit(part, num_layers)
        elif isinstance(part, JumpConfig):
            _check_jump(part)


def _check_exit(config: EarlyExitConfig, num_layers: int) -> None:
    if config.exit_head is None:
        raise ConfigError("early_exit: learn must be false without exit_head, not true.")
    if config.one_pass:
        raise ConfigError("early_exit: learn must be false with look_ahead, not true.")
    if config.exit_layer >= num_layers:
        raise ConfigError(f"early_exit: learn must be false for an exit after all {num_layers} layers, not true.")


def _check_jump(config: JumpConfig) -> None:
    head = JumpHead.read_config(config.head)
    if (head.early_layers, head.late_layer) != (0, head.num_layers):
        raise ConfigError(
            "jump: learn must be false for a head that runs layers, not true: early_layers is "
            f"{head.early_layers}, and late_layer {head.late_layer} of {head.num_layers} ({config.head})."
        )
