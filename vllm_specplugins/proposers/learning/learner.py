"""Connects the engine with the trainer of one part: passes readings to the trainer, installs new weights, and saves the
served weights. The engine's thread calls `step`, which never waits, and `close`. A failure ends learning, and drafting
continues.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from time import monotonic

import torch

from vllm_specplugins.config import ConfigError, error_text
from vllm_specplugins.config.learn import LearnConfig
from vllm_specplugins.proposers.learning.pace import Pace, Stopped
from vllm_specplugins.proposers.learning.served import ServedEnd
from vllm_specplugins.proposers.learning.trainer import Part, Trainer, copied
from vllm_specplugins.proposers.learning.windows import ExitStates, Windows
from vllm_specplugins.stage import Series
from vllm_specplugins.structures.whole_file import SavedFolder
from vllm_specplugins.target import Reading

logger = logging.getLogger("vllm.specplugins")

MAX_DRAFT = 4  # maximum number of draft tokens of K that are trained and tested
NICENESS = 5  # niceness of the thread, if the system supports it
GRACE_S = 3.0  # time for the last save; vLLM gives a worker 5 s
RECENT = 0.001  # weight of one request's step in the measured acceptance length


class Learner:
    """Trains `part` while it serves; its weights change between steps. With `exits`, windows also hold the states that
    an exit has read."""

    def __init__(
        self, part: Part, config: LearnConfig, end: ServedEnd, num_draft: int, exits: ExitStates | None = None
    ):
        self._part, self._config, self.exits = part, config, exits
        like, num_draft = next(part.parameters()), min(num_draft, MAX_DRAFT)
        self._dtype, self._device = like.dtype, like.device
        with torch.inference_mode(False):
            loaded = copied(part)
        self._folder = None if config.path is None else SavedFolder(Path(config.path))
        if config.path is not None:
            self._resume(Path(config.path))
        self.unread_bytes = config.memory_bytes // 4  # for the engine's readings
        size, min_length = len(end.norm_weight), num_draft + 2
        if exits is not None:  # an exit does not read the last token of a fully accepted draft
            size, min_length = 2 * size, num_draft
        max_bytes = config.memory_bytes - self.unread_bytes
        self._windows = Windows(max_bytes, size, like.device, like.dtype, min_length)
        self.pace = Pace(config.busy_share, config.idle_share, meanwhile=self._take_in)
        with torch.inference_mode(False):
            self.trainer = Trainer(loaded, part, end, self._windows, num_draft, self.pace, self._promote)
        self._read: Callable[[], Iterable[Reading]] = tuple
        # The promoted weights and the previous weights, which the device may still read.
        self._promoted, self._before = list[torch.Tensor](), list[torch.Tensor]()
        self._is_new, self._is_saved, self._saved_at, self._complained = False, True, monotonic(), False
        self.is_on = False
        self._thread = threading.Thread(target=self._run, name="specplugins-learn", daemon=True)
        self._measured = 0.0

    def _resume(self, folder: Path) -> None:
        """Loads the weights that an earlier engine saved, if their shapes are those of the part."""
        if (folder / self._part.file).is_file():
            try:
                self._part.load_state_dict(self._part.like_this(folder).state_dict())
            except ConfigError as error:
                logger.warning(
                    "learn: training starts from the configured weights, because those in path do not fit: %s", error
                )

    def begin(self, read: Callable[[], Iterable[Reading]]) -> None:
        """Starts to learn from the readings that `read` returns, which are those since its last call. The learner's
        thread calls `read`."""
        self._read, self.is_on = read, True

    def rehearse(self) -> None:
        """Allocates the memory of a training step while the engine measures memory."""
        if self.is_on:
            with torch.inference_mode(False), torch.enable_grad():
                self.trainer.rehearse()

    def step(self) -> None:
        """Copies promoted weights to the serving part, between two steps. The first call starts the thread, since all
        graphs are recorded by then."""
        self.pace.stepped_at = monotonic()
        if self._is_new:
            self._is_new = False
            with torch.no_grad():
                torch._foreach_copy_(list(self._part.parameters()), self._promoted)
        if self.is_on and self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self.pace.stop()
        if self._thread.is_alive():
            self._thread.join(GRACE_S)
        self._save()
        if self._folder is not None:
            self._folder.close()

    @property
    def num_bytes(self) -> int:
        return self.unread_bytes + self._windows.num_bytes + self.trainer.num_bytes

    def counts(self) -> dict[str, int]:
        return {"examples": self._windows.num_tokens, **self.trainer.counts}

    def lengths(self) -> dict[str, float]:
        """Returns acceptance lengths: the measured one, and the expected ones of the loaded and the served weights."""
        return {"measured": self._measured, **self.trainer.lengths}

    def series(self) -> Iterator[Series]:
        """Yields metrics: the name, labels in addition to the stage, and the value."""
        yield "store_bytes", (), self.num_bytes
        for progress, count in self.counts().items():
            yield "learned", (progress,), count
        for weights, length in self.lengths().items():
            yield "learned_length", (weights,), length

    def _promote(self, part: Part) -> None:
        promoted = [tensor.to(self._dtype, copy=True) for tensor in part.parameters()]
        if promoted[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        self._before, self._promoted = self._promoted, promoted
        self._is_new, self._is_saved = True, False

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        is_cuda = self._device.type == "cuda"
        self.pace.begin()
        try:
            with torch.cuda.stream(torch.cuda.Stream(self._device)) if is_cuda else nullcontext():
                while True:
                    self.trainer.round()
                    if monotonic() - self._saved_at > self._config.save_every_s:
                        self._save()
        except Stopped:
            pass
        except Exception as error:
            self.is_on = False
            logger.warning(
                "learn: training stops (%s: %s). Requests continue with the last weights.",
                type(error).__name__,
                error_text(error),
            )

    def _take_in(self) -> None:
        with torch.no_grad():
            for reading in self._read():
                self._windows.add(reading)
                for count in reading.counts:
                    self._measured += (count - self._measured) * RECENT if self._measured else count

    def _save(self) -> None:
        """Saves new served weights as a whole or not at all."""
        self._saved_at = monotonic()
        if self._folder is None or self._is_saved:
            return
        try:
            self._folder.replace(lambda folder: self.trainer.serving.save(folder, self._dtype))
            self._is_saved, self._complained = True, False
        except (OSError, RuntimeError) as error:
            if not self._complained:
                text = "learn: weights cannot be saved to %s (%s). The next save tries again."
                logger.warning(text, self._folder.path, error_text(error))
            self._complained = True
