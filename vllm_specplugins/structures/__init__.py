"""Plain arrays and the code that works on them, below all rooms: they know tokens, and nothing of engines or policies.
Import from the modules: this one stays empty, so that importing one structure does not pay for another's compiler."""
