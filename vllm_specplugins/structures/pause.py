"""Computes the pause after failed attempts."""

FIRST_PAUSE_S = 1.0


class Pause:
    """A pause that doubles with each failure in a row, up to a limit. A success ends it.

    >>> pause = Pause(longest_s=60.0)
    >>> pause.failed(), pause.failed(), pause.seconds, pause.succeeded(), pause.seconds
    (True, False, 2.0, True, 0.0)
    """

    def __init__(self, longest_s: float):
        self._longest_s = longest_s
        self.seconds = 0.0  # 0: the last attempt succeeded

    def failed(self) -> bool:
        """Records a failure, and returns whether it is the first in a row, which the caller logs."""
        is_first = self.seconds == 0
        self.seconds = min(2 * self.seconds or FIRST_PAUSE_S, self._longest_s)
        return is_first

    def succeeded(self) -> bool:
        """Records a success, and returns whether it is the first after a failure."""
        was_failing, self.seconds = self.seconds > 0, 0.0
        return was_failing
