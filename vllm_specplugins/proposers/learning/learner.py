"""Between the engine and the trainer of one part: takes what was read, hands over new weights, saves what serves.

What the engine's thread calls is `step` and `close`; the former never waits. What fails ends the learning, not the
drafts.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from vllm_specplugins.config import ConfigError, LearnConfig, error_text
from vllm_specplugins.draft import ProposerContext
from vllm_specplugins.proposers.learning.exits import ExitStates
from vllm_specplugins.proposers.learning.pace import Pace, Stopped
from vllm_specplugins.proposers.learning.served import ServedEnd
from vllm_specplugins.proposers.learning.trainer import Part, Trainer, copied
from vllm_specplugins.proposers.learning.windows import Windows
from vllm_specplugins.structures.whole_file import SavedFolder
from vllm_specplugins.target import Reading

logger = logging.getLogger("vllm.specplugins")

MOST_DRAFT = 4  # draft tokens that are trained and tested, of K
NICENESS = 5  # of the thread, where the system knows such a thing
GRACE_S = 3.0  # for a last save: vLLM gives a worker 5 s
RECENT = 0.001  # a step's part of the measured acceptance length
CARD = """\
# A head that learned from traffic

Weights of `{source}`, trained by vllm-specplugins while it served. Of {examples:,} tokens that the target emitted, in
{steps:,} steps; {promotions} of {candidates} candidates were better on held-out windows and took over.
Expected tokens a step there: {loaded:.3f} as it was, {serving:.3f} now.

Serve it as `{field}`; a jump is trained further by `python -m vllm_specplugins train-jump MODEL --resume THIS_FOLDER`.
The weights were made from those of the target and from what it was asked: treat them as you treat that.
"""


class Learner:
    """See the module.

    Args:
        part: that serves; its weights are written to before steps.
        source: the folder that it came from.
        hidden_size: of the target.
        exits: what an exit reads, which is then kept beside what the target does.
    """

    def __init__(
        self,
        part: Part,
        config: LearnConfig,
        context: ProposerContext,
        source: str,
        hidden_size: int,
        exits: ExitStates | None = None,
    ):
        self._part, self._config, self._source, self.exits = part, config, source, exits
        self._dtype = context.dtype or torch.float32
        self._num_draft = min(context.max_num_draft, MOST_DRAFT)
        with torch.inference_mode(False):
            self._loaded = copied(part)
        path = None if config.path is None else Path(f"{config.path}{context.file_suffix or ''}")
        self._folder = None if path is None else SavedFolder(path)
        if path is not None:
            self._go_on(path)
        self.unread_bytes = config.memory_bytes // 4  # for what the engine has not handed over yet
        size, shortest = hidden_size, self._num_draft + 2
        if exits is not None:  # which does not read the last token of a whole draft
            size, shortest = 2 * hidden_size, self._num_draft
        kept_bytes = config.memory_bytes - self.unread_bytes
        self._windows = Windows(kept_bytes, size, context.device, self._dtype, shortest)
        self.pace = Pace(config.busy_share, config.idle_share, meanwhile=self._take_in)
        self.trainer: Trainer | None = None
        self._take: Callable[[], Iterable[Reading]] = tuple
        # The device may still read those before.
        self._promoted, self._before = list[torch.Tensor](), list[torch.Tensor]()
        self._is_new, self._is_saved, self._saved_at, self._complained = False, True, monotonic(), False
        self.is_on, self._device = False, torch.device(context.device)
        self._thread = threading.Thread(target=self._run, name="specplugins-learn", daemon=True)
        self._measured = 0.0

    def _go_on(self, folder: Path) -> None:
        """Serves what was learned by an engine before this one, if it is of the same shape."""
        if (folder / self._part.file).is_file():
            try:
                self._part.load_state_dict(self._part.like_this(folder).state_dict())
            except ConfigError as error:
                logger.warning("learn: path is begun anew: %s", error)

    def begin(self, model: ServedEnd | None, take: Callable[[], Iterable[Reading]]) -> None:
        """The target is there: its end, or None where that cannot be trained through, which was said; and what gives,
        in the learner's thread, what was read since it was last asked."""
        self._take, self.is_on = take, model is not None
        if model is not None:
            with torch.inference_mode(False):
                own = model, self._windows, self._num_draft, self.pace, self._promote
                self.trainer = Trainer(self._loaded, self._part, *own)

    def rehearse(self) -> None:
        """To be called while the engine measures its memory: the KV cache then leaves room for a step of training."""
        if self.trainer is not None and self.is_on:
            with torch.inference_mode(False), torch.enable_grad():
                self.trainer.rehearse()

    def step(self) -> None:
        """Called between steps: new weights serve from the next one on. The first one begins the learning, so that no
        graph is being recorded then."""
        self.pace.stepped_at = monotonic()
        if self._is_new:
            self._is_new = False
            with torch.no_grad():
                torch._foreach_copy_(list(self._part.parameters()), self._promoted)
        if self.is_on and self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Ends the thread and saves."""
        self.pace.stop()
        if self._thread.is_alive():
            self._thread.join(GRACE_S)
        self._save()
        if self._folder is not None:
            self._folder.close()

    @property
    def num_bytes(self) -> int:
        """Memory for what is kept, and of weights in training."""
        return self.unread_bytes + self._windows.num_bytes + (0 if self.trainer is None else self.trainer.num_bytes)

    def counts(self) -> dict[str, int]:
        """Running totals."""
        return {"examples": self._windows.num_tokens, **(self.trainer.counts if self.trainer else {})}

    def lengths(self) -> dict[str, float]:
        """Acceptance lengths: measured lately; expected of the loaded weights and of those that serve."""
        return {"measured": self._measured, **(self.trainer.lengths if self.trainer else {})}

    def _promote(self, part: Part) -> None:
        promoted = [tensor.to(self._dtype, copy=True) for tensor in part.parameters()]
        if promoted[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        self._before, self._promoted = self._promoted, promoted
        self._is_new, self._is_saved = True, False

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        assert self.trainer is not None
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
            logger.warning("Learning ends (%s: %s); requests go on.", type(error).__name__, error_text(error))

    def _take_in(self) -> None:
        with torch.no_grad():
            for read in self._take():
                self._windows.add(read)
                for count in read.counts:
                    self._measured += (count - self._measured) * RECENT if self._measured else count

    def _save(self) -> None:
        """Writes the serving weights and their card, all or none, if they are new."""
        self._saved_at = monotonic()
        if self._folder is None or self._is_saved or self.trainer is None:
            return
        serving = self.trainer.serving
        card = CARD.format(source=self._source, field=serving.field, **self.counts(), **self.lengths())

        def write(folder: Path) -> None:
            serving.save(folder, self._dtype)
            (folder / "README.md").write_text(card)

        try:
            self._folder.replace(write)
            self._is_saved, self._complained = True, False
        except (OSError, RuntimeError) as error:
            if not self._complained:
                what = "learn: %s cannot be written (%s); it is tried again."
                logger.warning(what, self._folder.path, error_text(error))
            self._complained = True


def learner_of(proposer: Any) -> Learner | None:
    """Of the stages of a cascade, or of the proposer that is its only one, the one that learns."""
    stages = getattr(proposer, "named_stages", lambda: [("", proposer)])()
    return next((own for _, stage in stages if isinstance(own := getattr(stage, "learner", None), Learner)), None)
