"""Methods that other packages register: entry points of the group `vllm_specplugins.proposers`.

`name = package.module:Class`; the class follows `draft.Proposer`. Names are read from the packages' metadata, and
nothing of a package is imported before its method is asked for: a broken one harms nobody else, nor one that cannot be
read.
"""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions

logger = logging.getLogger("vllm.specplugins")

GROUP = "vllm_specplugins.proposers"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Registered:
    """One registration.

    Args:
        name: of the method.
        proposer: "package.module:Class".
        package: the distribution that registers it.
        refusal: why it cannot be used, in a sentence; None if it can.
    """

    name: str
    proposer: str
    package: str
    refusal: str | None = None


def registrations(reserved: Collection[str] = ()) -> tuple[Registered, ...]:
    """What is registered on this machine; a name that is reserved or taken twice has a refusal."""
    by_package: dict[str, list[tuple[str, str, str]]] = {}
    for entries in filter(None, map(_entries, distributions())):
        by_package.setdefault(entries[0][2], entries)  # what lies first on the path
    found = sorted({entry for entries in by_package.values() for entry in entries})
    names = [name for name, _, _ in found]
    return tuple(
        Registered(name, proposer, package, _refusal(name, package, names, reserved))
        for name, proposer, package in found
    )


def _entries(package: Distribution) -> list[tuple[str, str, str]]:
    """Name, value and package of what one registers; nothing if that cannot be read."""
    try:
        points = package.entry_points.select(group=GROUP)
        return [(point.name, point.value.replace(" ", ""), package.name or "?") for point in points]
    except Exception as error:
        path = getattr(package, "_path", "?")
        logger.error(
            "vllm-specplugins: the package at %s is left out: it cannot be read (%s).", path, type(error).__name__
        )
        return []


def _refusal(name: str, package: str, names: list[str], reserved: Collection[str]) -> str | None:
    who = f"the method {name!r} that the package {package!r} registers"
    if name in reserved:
        return f"{who} is refused: the name is that of a method of ours or of vLLM's."
    if names.count(name) > 1:
        return f"{who} is refused: another entry point registers the same name."
    if not _NAME.fullmatch(name):
        return f"{who} is refused: a name is made of letters, digits, '_', '-' and '.', and begins with a letter."
    return None


def usable(reserved: Collection[str] = ()) -> Mapping[str, Registered]:
    """The registered methods that can be asked for, by name."""
    return {found.name: found for found in registrations(reserved) if found.refusal is None}
