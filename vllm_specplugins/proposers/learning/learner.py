"""Between the engine and the trainer of one part: takes examples and, before a step, new weights; saves what serves.

Everything here that the engine's thread calls is short and never waits; what fails ends the learning, not the drafts.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from vllm_specplugins.config import ConfigError, LearnConfig, error_text
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.proposers.heads.trained import TrainedPart
from vllm_specplugins.proposers.learning.examples import Examples
from vllm_specplugins.proposers.learning.pace import Pace, Stopped
from vllm_specplugins.proposers.learning.served import ServedEnd
from vllm_specplugins.proposers.learning.trainer import MakeGuesser, Results, Trainer
from vllm_specplugins.proposers.learning.windows import Windows
from vllm_specplugins.structures.whole_file import replace_files
from vllm_specplugins.target import Reading

logger = logging.getLogger("vllm.specplugins")

MOST_DRAFT = 4  # draft tokens that are trained and tested, of K
NICENESS = 5  # of the thread, where the system knows such a thing
GRACE_S = 3.0  # for a last save: vLLM gives a worker 5 s
RECENT = 0.001  # a step's part of the measured acceptance length
CARD = """\
# A {noun} that learned from traffic

Weights of `{source}`, trained by vllm-specplugins while it served. Of {examples:,} tokens that the target emitted, in
{steps:,} steps; {promotions} of {candidates} candidates were better on held-out windows and took over.
Expected tokens a step there: {loaded:.3f} as it was, {serving:.3f} now.

Serve it as the `{file}` it is, or go on training: `python -m vllm_specplugins train-jump MODEL --resume THIS_FOLDER`.
The weights were made from those of the target and from what it was asked: treat them as you treat that.
"""


class Learner:
    """See the module.

    Args:
        part: that serves; its weights are written to before steps.
        source: the folder that it came from.
    """

    def __init__(
        self, part: Any, config: LearnConfig, context: ProposerContext, source: str, make_guesser: MakeGuesser
    ):
        self._part, self._config, self._source, self._make_guesser = part, config, source, make_guesser
        self._dtype = context.dtype or torch.float32
        self._num_draft = min(context.max_num_draft, MOST_DRAFT)
        self._loaded: TrainedPart = type(part).load(source, context.device)
        self._path = None if config.path is None else Path(f"{config.path}{context.file_suffix or ''}")
        if self._path is not None:
            self._go_on(self._path)
        windows = Windows(config.memory_bytes, part.config.hidden_size, context.device, self._dtype)
        self._windows, self._examples = windows, Examples(windows, self._num_draft + 2)
        self.pace = Pace(config.busy_share, config.idle_share)
        self.trainer: Trainer | None = None
        self._pending: list[torch.Tensor] | None = None
        self._is_on, self._is_saved, self._saved_at, self._complained = True, True, monotonic(), False
        self._thread = threading.Thread(target=self._run, name="specplugins-learn", daemon=True)
        self._measured = 0.0

    def _go_on(self, folder: Path) -> None:
        """Serves what was learned by an engine before this one, if it is of the same shape."""
        if not (folder / type(self._part).file).is_file():
            return
        try:
            if (found := type(self._part).check(folder)) != self._part.config:
                type(self._part).refuse(folder, f"a {self._part.noun} like that in {self._source}", str(found))
        except ConfigError as error:
            logger.warning("learn: path is begun anew: %s", error)
            return
        with torch.no_grad():
            self._part.load_state_dict(type(self._part).load(folder, dtype=self._dtype).state_dict())

    def begin(self, model: ServedEnd | None) -> None:
        """The target is there: its end, or None where that cannot be trained through, which was said."""
        if model is None:
            self._is_on = False
            return
        with torch.inference_mode(False):
            self.trainer = Trainer(
                self._loaded, self._part, model, self._make_guesser, self._windows, self._num_draft, self.pace,
                self._promote,
            )  # fmt: skip
        self._thread.start()

    def see(self, read: Reading) -> None:
        """A step's reading; called between steps, before anything is drafted."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with torch.no_grad():
                torch._foreach_copy_(list(self._part.parameters()), pending)
        self.pace.stepped_at = monotonic()
        if self._is_on:
            self._guarded(lambda: self._examples.add(read))
            for count in read.counts:
                self._measured += (count - self._measured) * RECENT if self._measured else count

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests are gone."""
        self._guarded(lambda: self._examples.forget(request_ids))

    def close(self) -> None:
        """Ends the thread and saves."""
        self.pace.stop()
        if self._thread.is_alive():
            self._thread.join(GRACE_S)
        self._save()

    @property
    def num_bytes(self) -> int:
        """Memory of windows and of weights in training."""
        return self._windows.num_bytes + (0 if self.trainer is None else self.trainer.num_bytes)

    def counts(self) -> dict[str, int]:
        """Running totals."""
        own = self._results
        totals = {"candidates": own.candidates, "promotions": own.promotions, "rollbacks": own.rollbacks}
        return {"examples": self._examples.num_tokens, "steps": own.steps, **totals}

    def lengths(self) -> dict[str, float]:
        """Acceptance lengths: measured lately; expected of the loaded weights and of those that serve."""
        return {"measured": self._measured, **self._results.lengths}

    @property
    def _results(self) -> Results:
        return Results() if self.trainer is None else self.trainer.results

    def _promote(self, part: TrainedPart) -> None:
        self._pending = [tensor.to(self._dtype, copy=True) for tensor in part.parameters()]
        self._is_saved = False

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        assert self.trainer is not None
        self.pace.begin()
        with suppress(Stopped):
            while self._is_on:
                self._guarded(self.trainer.round)
                if monotonic() - self._saved_at > self._config.save_every_s:
                    self._save()

    def _guarded(self, work: Callable[[], Any]) -> None:
        if not self._is_on:
            return
        try:
            work()
        except Stopped:
            raise
        except Exception as error:
            self._is_on = False
            logger.warning("Learning ends (%s: %s); requests go on.", type(error).__name__, error_text(error))

    def _save(self) -> None:
        """Writes the serving weights and their card, all or none, if they are new."""
        self._saved_at = monotonic()
        if self._path is None or self._is_saved or self.trainer is None:
            return
        serving, results = self.trainer.serving, self._results
        words = {"noun": self._part.noun, "source": self._source, "file": self._part.field, "steps": results.steps}
        totals = {"promotions": results.promotions, "candidates": results.candidates, **results.lengths}
        card = CARD.format(**words, **totals, examples=self._examples.num_tokens)

        def write(folder: Path) -> None:
            serving.save(folder, self._dtype)
            (folder / "README.md").write_text(card)

        try:
            replace_files(self._path, write)
            self._is_saved, self._complained = True, False
        except (OSError, RuntimeError) as error:
            if not self._complained:
                logger.warning("learn: %s cannot be written (%s); it is tried again.", self._path, error_text(error))
            self._complained = True
