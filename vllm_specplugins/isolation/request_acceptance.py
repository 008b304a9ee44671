"""Acceptance of single requests, from their first step to their last."""

from collections.abc import Sequence

from vllm_specplugins.draft import Feedback


class Acceptance:
    """Draft tokens verified and accepted of the requests that live."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self._over: set[str] = set()  # since the last feedback, which may come a step late and name them once more

    def add(self, feedback: Feedback) -> None:
        """Counts one step's verification."""
        over, self._over = self._over, set()
        fates = zip(feedback.request_ids, feedback.num_draft.tolist(), feedback.num_accepted.tolist(), strict=True)
        for request_id, num_draft, num_accepted in fates:
            if num_draft and request_id not in over:
                verified, accepted = self._counts.get(request_id, (0, 0))
                self._counts[request_id] = (verified + num_draft, accepted + num_accepted)

    def take(self, request_ids: Sequence[str]) -> list[float]:
        """Acceptance rates of requests that are over; of those that never had a draft there is none."""
        self._over.update(request_ids)
        counts = [self._counts.pop(request_id, None) for request_id in request_ids]
        return [count[1] / count[0] for count in counts if count is not None]
