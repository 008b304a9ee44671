"""What an object keeps: the sizes of all containers that can be reached from it."""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

_CONTAINERS = (dict, list, set, frozenset, tuple, deque)


def sizes(*roots: Any) -> dict[str, int]:
    """Length of each dict, list, set and deque, by the path to it, with those behind all keys as one. Objects of other
    packages are not entered.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    pending = [(type(root).__name__, root) for root in roots]
    while pending:
        path, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            if not isinstance(value, (tuple, frozenset)):
                found[path] += len(value)
            pending += [(f"{path}[]", item) for item in (value.values() if isinstance(value, Mapping) else value)]
        elif type(value).__module__.split(".")[0] == "vllm_specplugins":
            names = [*getattr(value, "__dict__", ()), *(n for c in type(value).__mro__ for n in _slots(c))]
            pending += [(f"{path}.{name}", getattr(value, name, None)) for name in names]
    return dict(found)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
