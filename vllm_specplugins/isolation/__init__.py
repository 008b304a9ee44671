"""A proposer's faults cost its draft, and nothing else. Adapters call a barrier, and its guard calls the proposer, if
possible in a thread with a time budget. The proposer receives read-only data, and its answer is checked."""
