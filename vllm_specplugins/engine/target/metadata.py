"""Whether the attention metadata of a draft can be brought up to date in place."""

from typing import Any

_CLAIMS = ("supports_draft_decode_metadata_update", "update_draft_decode_metadata", "__init__")


def updates_in_place(group: Any) -> bool:
    """Not so where a class overrides `build` alone, as chunked local attention does, which derives batches of its own
    from lengths: it has inherited the claim, and an update that does not know of them."""
    if not group.supports_draft_decode_metadata_update:
        return False
    kinds = type(group.get_metadata_builder()).__mro__
    builds = next(index for index, kind in enumerate(kinds) if "build" in vars(kind))
    claims = next(index for index, kind in enumerate(kinds) if any(name in vars(kind) for name in _CLAIMS))
    return claims <= builds
