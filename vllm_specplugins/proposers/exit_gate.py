"""Whether the exit of a cascade on the device is worth its time: decided on the host, one step late.

Which of its tokens are verified is adaptive verification's choice; drafting them costs, too, the same whatever comes of
it. The exit drafts where steps with it emit more tokens a ms than steps without it, of which some are made now and then
to know (see gate.py). Goes by counts and by costs that were measured at the start, not by a clock, so that all ranks
choose alike.
"""

from dataclasses import dataclass

from vllm_specplugins.proposers.gate import EXPLORE_EVERY, EXPLORE_SHARE, GOOD_ACCEPTANCE

DECAY = 0.9  # of what is known, by step of that kind


@dataclass(slots=True)
class ExitGate:
    """Averages of what steps emit, by request, with drafts of the exit and without them; 0: not known yet."""

    width: int  # K
    emitted_with: float = 0.0
    emitted_without: float = 0.0
    num_steps: int = 0  # since the kind that seems worse was tried

    def add(self, num_reqs: int, num_emitted: int, has_exited: bool) -> None:
        """What one step has emitted; whether the exit had drafted for it."""
        if num_reqs == 0:
            return
        found, name = num_emitted / num_reqs, "emitted_with" if has_exited else "emitted_without"
        old = getattr(self, name) or found
        setattr(self, name, old + (1 - DECAY) * (found - old))

    def pays(self, draft_ms: float, verify_ms: float) -> bool:
        """Whether to draft from the exit in this step; now and then the other way, to see what that would bring.

        Args:
            draft_ms: of drafting for the whole batch.
            verify_ms: of a step without it.

        >>> gate = ExitGate(4)
        >>> gate.pays(1.0, 10.0), gate.pays(100.0, 10.0)
        (True, False)
        """
        times = verify_ms, verify_ms + draft_ms
        tokens = self.emitted_without or 1.0, self.emitted_with or 1 + GOOD_ACCEPTANCE * self.width
        best = tokens[1] / times[1] >= tokens[0] / times[0]
        lost_ms = times[not best] - tokens[not best] * times[best] / tokens[best]  # by a trial
        self.num_steps += 1
        if self.num_steps < max(EXPLORE_EVERY, lost_ms / times[best] / EXPLORE_SHARE):
            return best
        self.num_steps = 0
        return not best
