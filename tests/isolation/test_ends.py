"""The data of a request that a class on the host gets besides its tokens: the tenant, the prompt's length, and the
end."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_specplugins.counters import Counters
from vllm_specplugins.draft import Draft, DraftBatch, Feedback, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.exchange import for_proposer, rows_of
from vllm_specplugins.isolation.guard import MAX_ENDS, Guard
from vllm_specplugins.methods import build_proposer, has_tenants
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.tools.replay.simulate import Player

TEXTS = [np.arange(3 + 5 * number, 60 + 5 * number, dtype=np.int32) for number in range(4)]


class Learns:
    """Drafts wrong tokens, so the gate soon stops calling it, and records its calls."""

    def __init__(self, options: Any = None, context: Any = None, fails: bool = False):
        self.told: list[Any] = []
        self.prompt_lengths: list[int] = []
        self.fails = fails

    def propose(self, batch: DraftBatch) -> Draft:
        self.prompt_lengths += batch.prompt_lengths
        return Draft(np.zeros((batch.num_reqs, 1), np.int32), np.minimum(batch.max_num_draft, 1).astype(np.int32))

    def observe(self, feedback: Feedback) -> None: ...

    def finish(self, request_id: str, token_ids: Any, tenant: bytes) -> None:
        self.told.append((request_id, token_ids.tolist(), tenant))
        if self.fails:
            raise RuntimeError("planted")

    def forget(self, request_ids: Any) -> None:
        self.told.append(tuple(request_ids))


def batch(*names: str) -> DraftBatch:
    options = [{"tenant": b"x"} if name == "a" else {} for name in names]
    return DraftBatch(list(names), TEXTS[: len(names)], np.ones(len(names), np.int32), options)


def test_tenants_and_prompts() -> None:
    """Kills: a class that cannot know the tenant, or a copy of a batch that loses the lengths of prompts."""
    assert has_tenants(parse_config({"method": "custom", "proposer": "test_ends:Learns"}))
    given = DraftBatch(
        ["a", "b"], TEXTS[:2], np.ones(2, np.int32), [{"tenant": b"x"}, {"own": 1}], prompt_lengths=[3, 4]
    )
    assert given.tenants == for_proposer(given).tenants == [b"x", b""]
    assert list(for_proposer(given).prompt_lengths) == [3, 4]
    assert rows_of(given, [1], np.ones(1, np.int32)).prompt_lengths == (4,)
    assert rows_of(batch("a"), [0], np.ones(1, np.int32)).prompt_lengths == ()


@pytest.mark.parametrize("gate", ["auto", "off"])
def test_a_learner_sees_each_text_whole(gate: str) -> None:
    """The gate may no longer ask the class. Fails if the cascade does not pass on an end, or if an end comes after
    `forget`, has only the tokens that the class last saw, or has another tenant."""
    stages = [{"method": "custom", "proposer": "test_ends:Learns"}]
    config = parse_config({"method": "cascade", "stages": stages, "gate": gate})
    proposer: Any = build_proposer(config, ProposerContext(100, 128, 4, 2, tokenize=lambda text: []))
    barrier = FaultBarrier(proposer, 100, 2, None)
    recorded = SimpleNamespace(histories=TEXTS, prompt_lengths=[3] * 4, options=[{"tenant": b"x"}, {}, {}, {}])
    player = Player(recorded, 2, 128, barrier)
    running = [0, 1, 2, 3]
    while running:
        player.step(running, 10.0)
        player.forget([number for number in running if player.has_ended(number)])
        running = [number for number in running if not player.has_ended(number)]
    barrier.settle()
    learner = proposer.stages[0].proposer
    ends = [told for told in learner.told if len(told) == 3 and isinstance(told[1], list)]
    tenants = [b"x", b"", b"", b""]
    assert ends == [(f"request-{number}", TEXTS[number].tolist(), tenants[number]) for number in range(4)]
    forgotten = next(at for at, told in enumerate(learner.told) if told not in ends and "request-0" in told)
    assert learner.told.index(ends[0]) < forgotten
    assert set(learner.prompt_lengths) == {3}


def test_ends_are_bounded_and_told_once() -> None:
    """Kills: a text of a request that the class never saw; one that is told again after the class fails at it; a class
    without `finish` for which texts are kept; texts without end for a class that is switched off."""
    learner = Learns(fails=True)
    guard = Guard(learner, "it", Counters())
    guard.call(batch("a", "b"), lambda: None)
    guard.forget(["a", "never seen"], {"a": TEXTS[0], "never seen": TEXTS[1]})
    assert guard.call(batch("b"), lambda: 1) is None and learner.told == [("a", TEXTS[0].tolist(), b"x")]
    assert guard.call(batch("b"), lambda: 1) == 1 and learner.told[1:] == [("a",)], "once, and then forgotten"
    names = [f"{number}" for number in range(2 * MAX_ENDS)]
    guard._known.update(names)
    guard.forget(names, dict.fromkeys(names, TEXTS[0]))
    assert len(guard._ends) == MAX_ENDS
    deaf = Guard(SimpleNamespace(forget=list), "it", Counters())  # type: ignore[arg-type]
    deaf.call(batch("a"), lambda: None)
    deaf.forget(["a"], {"a": TEXTS[0]})
    assert not deaf._ends
