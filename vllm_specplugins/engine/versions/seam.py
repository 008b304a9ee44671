"""What a record of the version contract is, and short ways to write the usual ones."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

REGISTRY = "https://github.com/vllm-project/vllm/issues/36219"  # RFC: a registry for proposers
CUSTOM_CLASS = "https://github.com/vllm-project/vllm/pull/39487"  # the custom_class slot of V1
PARAMETERS = "https://github.com/vllm-project/vllm/issues/42744"  # min_p and logit_bias under speculation


@dataclass(frozen=True, slots=True)
class Seam:
    """One thing of vLLM that we touch.

    Args:
        file: source file below vLLM's package folder.
        name: "function", "Class.method", "Class.attribute" or a module's global name.
        parameters: the names of the function's parameters; None if it is not a function.
        kind: "wrap" (replaced while the plugin is loaded), "patch" (replaced once a method of ours runs),
            "swap" (replaced for the length of one call), "instance" (set on one object), "override" (in a
            subclass of ours), "read".
        why: what we need it for.
        upstream: where vLLM discusses a public way.
        remove_when: what makes this record unnecessary.
    """

    file: str
    name: str
    parameters: tuple[str, ...] | None
    kind: str
    why: str
    upstream: str = REGISTRY
    remove_when: str = "vLLM has a registry for proposers"


def names_of(words: str) -> tuple[str, ...]:
    """Names that are written in one string."""
    return tuple(words.split())


def verifies(file: str, owner: str, names: str, kind: str, why: str) -> Iterator[Seam]:
    """Attributes of one class that verification touches."""
    for name in names.split():
        yield Seam(file, f"{owner}.{name}", None, kind, why, PARAMETERS, "vLLM verifies with every sampling parameter")


def verifies_by(file: str, name: str, parameters: str, kind: str, why: str) -> Seam:
    """A function that verification touches."""
    end = "vLLM verifies with every sampling parameter"
    return Seam(file, name, names_of(parameters), kind, why, PARAMETERS, end)


def members_of(file: str, owner: str, members: str, why: str, kind: str = "read") -> Iterator[Seam]:
    """Members of a class, or names of a module where `owner` is empty; functions are written `name(self, argument)`."""
    for name, bracket, parameters in re.findall(r"(\w+)(\(([^)]*)\))?", members):
        names = names_of(parameters.replace(",", " ")) if bracket else None
        yield Seam(file, f"{owner}.{name}" if owner else name, names, kind, why)
