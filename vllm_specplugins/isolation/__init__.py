"""Faults of a proposer cost its draft, nothing else.

Adapters call a barrier (`barrier.py`). A guard (`guard.py`) calls one proposer, in a thread with a time budget where
that is possible; the proposer receives read-only data, and its answer is checked (`exchange.py`). Faults are counted
and logged, and repeated faults switch the proposer off for a while (`faults.py`).
"""
