"""Engines that take turns: in each round every one serves the same traffic, and all get through it side by side."""

from collections.abc import Callable, Mapping, Sequence

from vllm_specplugins.engine.harness.serving import ServingEngine, Traffic, Turn


def serve_rounds(
    engines: Mapping[str, ServingEngine], rounds: Sequence[Traffic], advance: Callable[[], None]
) -> dict[str, list[Turn]]:
    """The turns of each engine.

    Args:
        engines: by method.
        rounds: what each round asks all engines; the first one warms up.
        advance: called after each round.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    names = list(engines)
    for index, traffic in enumerate(rounds):
        first = index % len(names)  # who goes first may matter
        served = serve_round({name: engines[name] for name in names[first:] + names[:first]}, traffic)
        for name in names:
            turns[name].append(served[name])
        advance()
    return turns


def serve_round(engines: Mapping[str, ServingEngine], traffic: Traffic) -> dict[str, Turn]:
    """One turn of each engine; whoever has made the fewest tokens goes on."""
    turns: dict[str, Turn] = {}
    num_tokens = dict.fromkeys(engines, 0)
    for engine in engines.values():
        engine.begin(traffic)
    while num_tokens:
        name = min(num_tokens, key=lambda name: num_tokens[name])
        answer = engines[name].go_on()
        if isinstance(answer, Turn):
            turns[name] = answer
            del num_tokens[name]
        else:
            num_tokens[name] = answer
    return turns
