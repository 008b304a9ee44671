"""Plain data structures that proposers search: they know tokens, and nothing of engines, devices or models.

Import from the module that holds the structure (`structures.recycled`): this front door stays empty, so
that importing one structure does not pay for another's compiler.
"""
