"""Attributes that are set, and put back."""

from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches(ExitStack):
    """Undoes in reverse what `set` did."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        if own is _MISSING:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, own)

    def set_in_modules(self, prefix: str, name: str, value: Any) -> None:
        """In all modules below a package that have this name, because they imported it."""
        import sys

        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith(prefix) and name in vars(module):
                self.set(module, name, value)
