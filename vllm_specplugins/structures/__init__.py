"""Plain arrays and the code that works on them, below all rooms: they know tokens, and nothing of engines or policies.

A step's requests and drafts (`arrays.py`), free memory (`spans.py`), files (`whole_file.py`), and the suffix store
(`suffix/`).
Import from the module: this door stays empty, so that importing one structure does not pay for another's compiler.
"""
