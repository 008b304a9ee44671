"""The usual time of a step or a call, on which an outlier has little effect. Delays only lengthen steps."""

from typing import Any

import numpy as np

from vllm_specplugins.kernels.compiled import compiled

OUTLIER_RATIO = 3.0  # a step that takes this multiple of its expected time is an outlier
FEW = 3  # the first steps, and consecutive outliers, up to this number do not count as usual
SHARE = 0.1  # weight of a step in a known time
MS, COUNT, OUTLIERS = range(3)  # columns of a record: the time, the steps it is from up to FEW, and outliers in a row


@compiled("f8(f8, f8, f8)")
def outliers_after(outliers: float, ms: float, expected_ms: float) -> float:
    """Returns the number of outliers in a row after a step. Up to FEW of them do not count; one more shows that steps
    have become slower."""
    return float(outliers + 1) if ms > OUTLIER_RATIO * expected_ms else 0.0


@compiled("void(f8[::1], f8)")
def add_ms(record: Any, ms: float) -> None:
    """Adds a time to a record. Of the first few, the least counts.

    >>> import numpy as np
    >>> record, known = np.zeros(3), []
    >>> for ms in (90.0, 30.0, 31.0, 500.0, 40.0):
    ...     add_ms(record, ms)
    ...     known.append(float(record[MS]))
    >>> known
    [90.0, 30.0, 30.0, 30.0, 31.0]
    """
    if record[COUNT] < FEW:
        record[MS] = min(record[MS], ms) if record[COUNT] else ms
        record[COUNT] += 1
        return
    record[OUTLIERS] = outliers_after(record[OUTLIERS], ms, record[MS])
    if 0 < record[OUTLIERS] <= FEW:
        return
    record[MS] += (1.0 if record[OUTLIERS] else SHARE) * (ms - record[MS])
    record[OUTLIERS] = 0


class UsualMs:
    """The usual time of a call, on which one slow call has little effect."""

    def __init__(self) -> None:
        self._record = np.zeros(1 + OUTLIERS)

    def add(self, ms: float) -> None:
        add_ms(self._record, ms)

    @property
    def ms(self) -> float:
        return float(self._record[MS])

    @property
    def num_calls(self) -> int:
        """The number of calls, up to FEW."""
        return int(self._record[COUNT])


@compiled("f8[::1](f8[::1], f8[::1])")
def never_less(values: Any, weights: Any) -> Any:
    """Returns the nearest non-decreasing values (isotonic regression): decreasing neighbours get their mean.

    >>> never_less(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    rising = np.empty(len(values))
    pools, starts, num_pools = np.empty(len(values)), np.empty(len(values), np.int64), 0  # weights of equal values
    for at in range(len(values)):
        start, value, weight = at, values[at], weights[at]
        while num_pools and rising[starts[num_pools - 1]] >= value:
            num_pools -= 1
            start, pool = starts[num_pools], pools[num_pools]
            value, weight = (value * weight + rising[start] * pool) / (weight + pool), weight + pool
        starts[num_pools], pools[num_pools] = start, weight
        rising[start : at + 1] = value
        num_pools += 1
    return rising
