"""Limits the effect of a proposer's faults to its drafts. Adapters call a barrier, whose guard calls the proposer, if
possible in a thread with a time budget. The proposer receives read-only data, and its answer is checked."""
