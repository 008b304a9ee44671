"""Resident memory over time: is it flat?"""

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
from server import Server

EVERY_S = 1.0
MIN_SECONDS = 30.0
MIB = 2**20


@dataclass(slots=True)
class Memory:
    """Samples of one life of a server: seconds, bytes."""

    seconds: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)

    async def watch(self, server: Server) -> None:
        """Samples until it is cancelled."""
        while True:
            self.seconds.append(time.monotonic())
            self.rss.append(server.rss())
            await asyncio.sleep(EVERY_S)

    def slope(self) -> float | None:
        """MiB a minute, by least squares over the second half: by then most caches are filled. None where that is too
        short to tell.

        >>> Memory([0.0, 30.0, 60.0, 90.0], [9 * MIB, 8 * MIB, 2 * MIB, 3 * MIB]).slope()
        2.0
        """
        if self.judged_minutes() * 60 < MIN_SECONDS:
            return None
        middle = len(self.rss) // 2
        seconds, rss = np.array(self.seconds[middle:]), np.array(self.rss[middle:], float)
        return round(float(np.polyfit(seconds - seconds[0], rss, 1)[0] * 60 / MIB), 6)

    def judged_minutes(self) -> float:
        """How long the second half was."""
        judged = self.seconds[len(self.seconds) // 2 :]
        return (judged[-1] - judged[0]) / 60 if judged else 0.0

    def last(self) -> float:
        """MiB at the end."""
        return self.rss[-1] / MIB if self.rss else 0.0
