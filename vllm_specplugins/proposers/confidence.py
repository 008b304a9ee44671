"""How likely each token of a draft is to be accepted: a small model for each stage, that learns from what was verified.

Logistic regression on what is known before a token is verified: how sure its stage is (for a lookup, the length of the
match), its place in the draft, and the record of its request at that grade of confidence (see records.py). The weights
follow each step's gradient over the curvature met so far, which forgets slowly. The arrays are NumPy's or torch's, and
nothing waits for a device. R: requests of a step, K: most tokens of a draft.
"""

from typing import Any

from vllm_specplugins.proposers.drafted import Array, Drafted, columns, like, namespace, up_to, zeros
from vllm_specplugins.proposers.records import Records
from vllm_specplugins.proposers.sent import Sent

NUM_FEATURES = 4
RECORD = 3  # the feature that a new model goes by alone
FEWEST = 0.02  # the record's chance counts as at least this and at most 1 less this
FIRST_CURVATURE = 4.0  # how much a weight's first value is worth
CURVATURE_DECAY = 0.995  # by step
STEP = 0.5  # of what the curvature of one weight alone would allow: weights move together


class Calibration:
    """Chances of acceptance, for requests that have rows in arrays.

    Args:
        num_rows: most rows; on the host there may come more.
        width: K.
        device: where the tensors are; None for arrays on the host.
    """

    def __init__(self, num_stages: int, num_rows: int, width: int, device: Any = None):
        self.records = Records(num_stages, num_rows, device)
        self._sent = Sent(width, num_rows, device)
        self._weights = zeros((num_stages, NUM_FEATURES), device)
        self._weights[:, RECORD] = 1.0
        self._curvature = zeros((num_stages, NUM_FEATURES), device) + FIRST_CURVATURE

    def predict(self, rows: Array, drafts: Drafted) -> Array:
        """[R, K] float: the chance of each token if those before it are accepted; 0 behind a draft's end.

        The drafts are kept until `learn` is told what became of them.

        Args:
            rows: [R] int64.
        """
        self._sent.put(rows, drafts)
        return self.chances(rows, drafts)

    def chances(self, rows: Array, drafts: Drafted) -> Array:
        """The same of drafts that are not kept."""
        chances = self._chances(self._features(rows, drafts.stage, drafts.confidence), drafts.stage)
        return namespace(chances).where(drafts.is_drafted, chances, 0.0)

    def learn(self, rows: Array, num_verified: Array, num_accepted: Array) -> None:
        """What became of the newest drafts, of which maybe not all tokens were verified; called once for each.

        Args:
            num_verified, num_accepted: [R] int.
        """
        fates = self._sent.take(rows, num_verified, num_accepted)
        places, stage = columns(fates.stage), fates.stage
        features = self._features(rows, stage, fates.confidence)
        chances = self._chances(features, stage)
        is_right = places < fates.num_accepted[:, None]
        is_tried = (places < fates.num_draft[:, None]) & (places <= fates.num_accepted[:, None])
        is_of = (stage[..., None] == up_to(len(self._weights), stage)) & is_tried[..., None]
        members = like(is_of, chances).reshape(-1, len(self._weights)).T
        errors, weights = (like(is_right, chances) - chances)[..., None], (chances * (1 - chances))[..., None]
        slopes = members @ (errors * features).reshape(-1, NUM_FEATURES)
        self._curvature *= CURVATURE_DECAY
        self._curvature += members @ (weights * features * features).reshape(-1, NUM_FEATURES)
        self._curvature += (1 - CURVATURE_DECAY) * FIRST_CURVATURE
        self._weights += STEP * slopes / self._curvature
        self.records.add(rows, *fates)

    def clear(self, rows: Array) -> None:
        """Forgets these requests."""
        self.records.clear(rows)
        self._sent.clear(rows)

    def _features(self, rows: Array, stage: Array, confidence: Array) -> Array:
        """[R, K, NUM_FEATURES], each of them some -1 to 1."""
        xp = namespace(confidence)
        record = self.records.chances(rows, stage, confidence)
        record = xp.clip(record, FEWEST, 1 - FEWEST)
        place = columns(stage) + 0.0 * record
        sure = xp.log(xp.where(confidence > 1, confidence, 1.0)) - 1.5
        parts = (place * 0 + 1, sure, place / 4 - 0.5, xp.log(record / (1 - record)))
        return xp.concatenate([part[..., None] for part in parts], axis=-1)

    def _chances(self, features: Array, stage: Array) -> Array:
        """[R, K]"""
        scores = (features * self._weights[stage]).sum(axis=-1)
        return 1 / (1 + namespace(scores).exp(-scores))
