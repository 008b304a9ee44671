"""Implements the commands of `vllm-specplugins`, which measure, replay and check methods, and train parts."""
