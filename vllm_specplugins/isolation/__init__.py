"""What keeps a proposer that raises, hangs or returns nonsense from costing more than its draft.

`barrier.py` is what adapters call. A guard (`guard.py`) calls one proposer, in a thread with a time budget where that
can be (`call_thread.py`), hands it read-only data and checks what it returns (`exchange.py`), and switches it
off after repeated faults (`circuit_breaker.py`).
"""
