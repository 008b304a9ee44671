"""Trains parts while the engine serves (Liu et al. 2023, "Online Speculative Decoding").

The engine's adapters make a `target.Reading` of each step. The learner's thread (`learner.py`) collects readings in
windows, trains a copy of the part for a share of the time, and promotes the copy if it is better on held-out windows.
The engine's thread copies promoted weights between two steps. The weights affect drafts only, never outputs.
"""
