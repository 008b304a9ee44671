"""A record of what we replace of vLLM."""

from dataclasses import dataclass

REGISTRY = "https://github.com/vllm-project/vllm/issues/36219"  # RFC: a registry for proposers


@dataclass(frozen=True, slots=True)
class Seam:
    """Names of vLLM that we replace for one reason.

    Args:
        target: "kind file class: members", or "kind file: names" of a module. The file is below vLLM's package folder;
            kind is "wrap" (replaced while the plugin is loaded), "patch" (replaced once a method of ours runs), "swap"
            (replaced for the length of one call), "instance" (set on one object), "override" (in a subclass of ours).
    """

    target: str
    why: str
    upstream: str = REGISTRY
    remove_when: str = "vLLM has a registry for proposers"

    @property
    def kind(self) -> str:
        return self.target.split()[0]

    @property
    def file(self) -> str:
        return self.target.split()[1].rstrip(":")

    @property
    def names(self) -> list[str]:
        """As vllm_names.json has them."""
        place, _, members = self.target.partition(": ")
        owner = "".join(f"{name}." for name in place.split()[2:])
        return [f"{owner}{member}" for member in members.split()]
