"""Faults of a proposer cost its draft, nothing else. Adapters call a barrier, and its guard calls the proposer, in a
thread with a time budget where that is possible. The proposer receives read-only data, and its answer is checked."""
