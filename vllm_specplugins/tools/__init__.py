"""The commands of `vllm-specplugins`: they measure, replay and check methods, and train parts."""
