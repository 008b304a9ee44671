"""Model Runner V2: what became of drafts, told without a wait for the device."""

import numpy as np
import torch

from vllm_specplugins.draft import Feedback


class LateFeedback:
    """What became of the drafts of the last step but one: a copy that was begun a step ago has arrived."""

    def __init__(self) -> None:
        nothing = np.zeros(0, np.int32)
        self._request_ids: list[str] = []
        self._counts: torch.Tensor | None = None
        self._arrived = torch.cuda.Event()  # of the runner's platform: vLLM's CPU worker has one that is always there
        self._none = Feedback((), nothing, nothing)

    def exchange(self, request_ids: list[str], num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> Feedback:
        """Begins to copy this step's counts; returns those of the step before."""
        feedback = self._read()
        num_reqs = len(request_ids)
        counts = torch.stack((num_sampled[:num_reqs], num_rejected[:num_reqs])).int()
        self._request_ids, self._counts = list(request_ids), counts.to("cpu", non_blocking=True)
        self._arrived.record()
        return feedback

    def take(self) -> Feedback:
        """What has not been told yet, where no step follows for a while."""
        feedback, self._counts = self._read(), None
        return feedback

    def _read(self) -> Feedback:
        if self._counts is None:
            return self._none
        self._arrived.synchronize()
        sampled, rejected = self._counts.numpy()
        rows = np.flatnonzero(sampled)  # the others were in the middle of their prompt
        accepted = sampled[rows] - 1
        return Feedback([self._request_ids[row] for row in rows], accepted + rejected[rows], accepted)
