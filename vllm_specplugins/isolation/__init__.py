"""What keeps a proposer that raises, hangs or returns nonsense from costing more than its draft.

`barrier.py` is what adapters call. A guard (`guard.py`) calls one proposer, in a thread with a time budget where that
can be, hands it read-only data and checks what it returns (`exchange.py`). What goes wrong is counted and logged, and
switches the proposer off if it goes on (`faults.py`).
"""
