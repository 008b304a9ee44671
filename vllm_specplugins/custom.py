"""Loads proposers of users, and methods that other packages register.

An entry point of the group `vllm_specplugins.proposers`, "name = module:Class", registers a class that follows
`draft.Proposer`. A package is imported only when its method is selected, so a broken package affects no other method.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import Distribution, distributions
from signal import SIGINT, SIGTERM, getsignal, signal
from typing import Any

from vllm_specplugins.config import ConfigError, CustomConfig, SpecConfig, brief, error_text, stage_configs
from vllm_specplugins.draft import PROTOCOL_VERSION, Proposer, ProposerContext
from vllm_specplugins.isolation.faults import cause_text

logger = logging.getLogger("vllm.specplugins")

GROUP = "vllm_specplugins.proposers"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
OptionCheck = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Registered:
    """A registration: the method's name, "package.module:Class", the distribution, and the reason for a refusal, if
    any."""

    name: str
    proposer: str
    package: str
    refusal: str | None = None


def registrations(reserved: Collection[str] = ()) -> list[Registered]:
    """Returns the registrations on this machine. Reserved names, and names that are registered twice, get a refusal."""
    by_package: dict[str, list[Registered]] = {}
    for entries in filter(None, map(_entries, distributions())):
        by_package.setdefault(entries[0].package, entries)  # the first on the path
    registered = sorted((entry for entries in by_package.values() for entry in entries), key=lambda entry: entry.name)
    names = [entry.name for entry in registered]
    return [replace(entry, refusal=_refusal(entry, names, reserved)) for entry in registered]


def _entries(package: Distribution) -> list[Registered]:
    try:
        points = package.entry_points.select(group=GROUP)
        return [Registered(point.name, point.value.replace(" ", ""), package.name or "?") for point in points]
    except Exception as error:
        path = getattr(package, "_path", "?")
        logger.error(
            "vllm-specplugins: the package at %s is ignored, since its metadata cannot be read (%s). Install it again.",
            path,
            type(error).__name__,
        )
        return []


def _refusal(entry: Registered, names: list[str], reserved: Collection[str]) -> str | None:
    if entry.name in reserved:
        why = "the plugin or vLLM already has a method with this name"
    elif names.count(entry.name) > 1:
        why = "another entry point registers the same name"
    elif not _NAME.fullmatch(entry.name):
        why = "a name may have only letters, digits, '_', '-' and '.', and must begin with a letter"
    else:
        return None
    return f"the method {entry.name!r} of the package {entry.package!r} is refused: {why}."


def build_custom(method: str, config: CustomConfig, context: ProposerContext) -> Proposer:
    """Builds the user's proposer, which cannot exchange values between ranks."""
    build, who = import_object(config.proposer, method), f"{method}: proposer {config.proposer!r}"
    alone = replace(context, num_ranks=1, rank=0, agreed=lambda value: value)
    try:
        with _same_signals():
            proposer: Proposer = build(config.options, alone)
        missing = [name for name in ("propose", "observe", "forget") if not callable(getattr(proposer, name, None))]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{who} cannot be built ({cause_text(error)}).") from error
    if missing:
        raise ConfigError(f"{who} has no method {', '.join(missing)}.")
    return proposer


@contextmanager
def _same_signals() -> Iterator[None]:
    """Restores the signal handlers after the user's code runs, so that signals still end an engine."""
    before = [(number, getsignal(number)) for number in (SIGINT, SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            if handler is not None and getsignal(number) is not handler:  # only the main thread can set a handler
                signal(number, handler)


def option_checks(config: SpecConfig) -> list[OptionCheck]:
    """Returns the `check_options` functions of the user's proposers in a method. They raise ValueError for options that
    they refuse."""
    checks = _attributes(config, "check_options")
    for path, check in checks.items():
        if check is not None and not callable(check):
            raise ConfigError(f"{config.method}: check_options of {path} must be a function, not {brief(check)}.")
    return [check for check in checks.values() if check is not None]


def declares(config: SpecConfig, name: str) -> bool:
    """Returns whether the user's class declares a flag, such as `may_be_late = True` or `drafts_on_device = True`."""
    return any(value is True for value in _attributes(config, name).values())


def _attributes(config: SpecConfig, name: str) -> dict[str, Any]:
    paths = [custom.proposer for custom in stage_configs(config, CustomConfig)]
    return {path: getattr(import_object(path, config.method), name, None) for path in paths}


def import_object(path: str, method: str = "custom") -> Callable[..., Any]:
    """Returns the class or function at "package.module:name". Raises ConfigError if it is missing, if its module raises
    or exits, if it cannot be called, or if it follows another protocol."""
    module, _, name = path.partition(":")
    try:
        with _same_signals():
            imported = getattr(import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the module may exit
        cause = f"{type(error).__name__}: {error_text(error)}"
        hint = "; PYTHONPATH=. adds the current folder to the path" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{method}: proposer {brief(path)} cannot be imported ({cause}{hint}).") from error
    if not callable(imported):
        raise ConfigError(
            f"{method}: proposer must name a class or a function that creates a proposer, not {brief(imported)}."
        )
    version = getattr(imported, "protocol_version", PROTOCOL_VERSION)
    if version != PROTOCOL_VERSION:
        raise ConfigError(
            f"{method}: protocol_version of {path} must be {PROTOCOL_VERSION}, the version of vllm_specplugins.draft, "
            f"not {brief(version)}."
        )
    return imported
