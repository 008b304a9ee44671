"""Clients that keep one server busy, and the book of correct answers for comparison."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import openai
from asking import BROKEN, Answer, Cut, abort, ask, client_of
from bad_options import Hostile, known, variant
from catalogue import Case, reference
from server import Server

WORKERS = 8
BURST = 64
BURST_EVERY_S = 25.0


class Book:
    """The correct answer to each case: the first answer of a server without speculation."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self.unstable: set[str] = set()

    def holds(self, case: Case) -> bool:
        return case.name in self._answers

    def enter(self, case: Case, answer: Answer) -> None:
        """An answer without speculation. One that contradicts an earlier one proves nothing about anybody: near-ties
        of a float32 sum that depends on the batch."""
        if self._answers.setdefault(case.name, answer) != answer:
            self.unstable.add(case.name)

    def difference(self, case: Case, answer: Answer) -> str | None:
        """What is wrong with an answer, in words."""
        right = self._answers[case.name]
        if answer == right or case.name in self.unstable:
            return None
        for index, (a, b) in enumerate(zip(right, answer, strict=True)):
            if a != b:
                return f"{case.name}, output {index}: {b} instead of {a}"
        return None


class Traffic:
    """Everything that clients do to one server.

    Args:
        server: whom they ask.
        cases: what they ask for.
        book: the right answers; without speculation they are entered, with it they are compared.
        speculates: whether the server runs a method of ours.
        rng: decides what comes next.
    """

    def __init__(self, server: Server, cases: list[Case], book: Book, speculates: bool, rng: random.Random):
        self._server, self._book, self._speculates, self._rng = server, book, speculates, rng
        self._cases = [case for case in cases if speculates or not case.sampled]
        self._client = client_of(server.url)
        self._hostile = known()
        self._bursts: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.in_flight = 0
        self.ends = False

    async def enter_references(self) -> None:
        """Asks each case that the book lacks once, without drafts."""
        options = '{"enabled": false}' if self._speculates else None
        queue = [case for case in self._cases if not self._book.holds(case)]

        async def work() -> None:
            while queue:
                case = queue.pop()
                self._book.enter(case, await ask(self._client, case, options, stream=False))
                self.counts["answered"] += 1

        await asyncio.gather(*(work() for _ in range(WORKERS)))

    async def run(self) -> None:
        """Keeps the server busy until `ends` is set, then waits for every answer."""
        workers = [asyncio.create_task(self._work()) for _ in range(WORKERS)]
        next_burst = time.monotonic()
        while not self.ends:
            if time.monotonic() >= next_burst and not self._bursts:
                self._burst()
                next_burst = time.monotonic() + BURST_EVERY_S
            await asyncio.sleep(0.2)
        await asyncio.gather(*workers, *self._bursts)

    async def calm(self) -> None:
        """Sends a few requests for which every method can draft, one after another."""
        for case in [case for case in self._cases if case.name.endswith("greedy")][:6]:
            await self._answered(case, None, stream=False)

    def _burst(self) -> None:
        for _ in range(BURST):
            task = asyncio.create_task(self._answered(self._case(), None, stream=self._rng.random() < 0.3))
            self._bursts.add(task)
            task.add_done_callback(self._bursts.discard)
        self.counts["bursts"] += 1

    async def _work(self) -> None:
        while not self.ends:
            await self._server.up.wait()
            dice = self._rng.random()
            if dice < 0.15:
                await self._aborted()
            elif dice < 0.30 and self._speculates:
                await self._hurt()
            else:
                await self._answered(self._case(), self._options(), stream=self._rng.random() < 0.5)

    def _case(self) -> Case:
        return self._rng.choice(self._cases)

    def _options(self) -> str | None:
        """Good ones, for some."""
        if not self._speculates or self._rng.random() < 0.5:
            return None
        case = self._case()
        good: list[dict[str, Any]] = [
            {"enabled": False},
            {"max_draft": self._rng.randrange(4)},
            {"max_context": self._rng.randrange(600)},
            {"reference": reference(case, self._rng)},
            {"reference": [self._rng.randrange(3072) for _ in range(100)]},
        ]
        return json.dumps(self._rng.choice(good))

    async def _answered(self, case: Case, options: Any, stream: bool) -> None:
        """Asks until there is an answer: again if the server was killed meanwhile, and only then."""
        while True:
            await self._server.up.wait()
            life = self._server.life
            try:
                answer = await self._counted(ask(self._client, case, options, stream))
            except (*BROKEN, Cut, TimeoutError, openai.APIError) as error:
                if self._server.life == life:
                    self.problems.append(f"lost: {case.name}, {options!r:.80}: {type(error).__name__}: {error}")
                    return
                self.counts["sent again"] += 1
                continue
            self._compare(case, answer)
            return

    def _compare(self, case: Case, answer: Answer) -> None:
        self.counts["answered"] += 1
        if not self._speculates:
            self._book.enter(case, answer)
            return
        self.counts["compared"] += 1
        difference = self._book.difference(case, answer)
        if difference is not None:
            self.counts["wrong"] += 1
            self.problems.append(f"wrong: {difference}")

    async def _aborted(self) -> None:
        life = self._server.life
        after_chunks = self._rng.choice((None, 1, 3, 10))
        doing = abort(self._client, self._case(), self._options(), after_chunks, self._rng.uniform(0.01, 2.0))
        try:
            await self._counted(doing)
            self.counts["aborted"] += 1
        except (*BROKEN, openai.APIError) as error:
            if self._server.life == life:
                self.problems.append(f"lost: a request to be aborted: {type(error).__name__}: {error}")

    async def _hurt(self) -> None:
        """One of the worst options that are known, or made up."""
        hostile = variant(self._rng) if self._rng.random() < 0.6 else self._rng.choice(self._hostile)
        life, case = self._server.life, self._case()
        try:
            answer = await self._counted(ask(self._client, case, hostile.options, stream=self._rng.random() < 0.3))
        except openai.APIStatusError as error:
            self._refused(hostile, error)
        except (*BROKEN, Cut, TimeoutError, openai.APIError) as error:
            # A stream is refused with an event of its own, after the 200.
            if isinstance(error, openai.APIError) and not isinstance(error, BROKEN) and "specplugins" in str(error):
                self.counts["refused"] += 1
            elif self._server.life == life:
                self.problems.append(f"lost: hostile ({hostile.name}): {type(error).__name__}: {error!s:.200}")
        else:
            if hostile.refused:
                self.problems.append(f"accepted: {hostile.name}: {hostile.options!r:.100}")
            self._compare(case, answer)

    def _refused(self, hostile: Hostile, error: openai.APIStatusError) -> None:
        """A 400 with one sentence, or else a problem."""
        body = error.body if isinstance(error.body, dict) else {}
        message = str(body.get("message", ""))
        self.counts["refused"] += 1
        if error.status_code != 400 or not message.endswith(".") or len(message) > 300 or "\n" in message:
            said = f"{error.status_code}, {message!r:.300}"
            self.problems.append(f"refused badly: {hostile.name}, {hostile.options!r:.100}: {said}")

    async def _counted(self, doing: Coroutine[Any, Any, Any]) -> Any:
        self.in_flight += 1
        try:
            return await doing
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self._client.close()
