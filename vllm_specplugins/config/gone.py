"""Settings that were removed, and what to use instead; for refusals."""

# Of methods, fields and commands.
NAMES = {
    "cost_table": "leave it out, for the gate learns what steps cost while it serves",
    "token_recycling": "use suffix_lookup",
    "train-medusa": "use train-jump, whose parts draft better",
}
_POLICY = "'auto' drafts as it did, where that pays; with gate 'off' the first stage that has something drafts"
_VALUES = {"exit_layer": {"auto": "`calibrate` finds the layer"}, "policy": {"first": _POLICY, "extend": _POLICY}}


def in_place_of(field: str, value: object) -> str:
    """How the refusal of a field's value ends, if it was allowed once.

    >>> in_place_of("exit_layer", "auto"), in_place_of("exit_layer", 0)
    (': `calibrate` finds the layer', '')
    """
    gone = _VALUES.get(field, {})
    instead = gone.get(value if isinstance(value, str) else "auto" if isinstance(value, list | tuple) else "")
    return f": {instead}" if instead else ""
