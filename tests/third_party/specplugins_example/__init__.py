"""Another package's proposers, for the tests: drafts that repeat the last token."""

from dataclasses import dataclass

import numpy as np

from vllm_specplugins.config import ConfigError, check_fields, integer
from vllm_specplugins.device import DeviceProposer
from vllm_specplugins.draft import Draft


@dataclass(frozen=True, kw_only=True)
class RepeatConfig:
    """`repeat`: how many times."""

    times: int = integer(2, 1, 8)

    def __post_init__(self):
        check_fields(self, "repeat")
        if self.times == 5:
            raise ConfigError("repeat: times must not be 5.")


class RepeatPlain:
    """Takes options."""

    protocol_version = 1

    def __init__(self, options, context):
        self._times = options.get("times", 2)

    def propose(self, batch):
        last = np.array([tokens[-1] for tokens in batch.token_ids], np.int32)
        lengths = np.minimum(batch.max_num_draft, self._times).astype(np.int32)
        return Draft(np.repeat(last[:, None], int(lengths.max(initial=0)), axis=1), lengths)

    def observe(self, feedback):
        pass

    def forget(self, request_ids):
        pass


class Repeat(RepeatPlain):
    """Has a configuration of its own."""

    Config = RepeatConfig

    def __init__(self, config, context):
        self._times = config.times


class Old(RepeatPlain):
    """Was written for a protocol that is not this one."""

    protocol_version = 0


class OnDevice(DeviceProposer):
    """Repeats the newest token; or has a fault."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self.fault = options.get("fault")

    def start(self, request_id, slot, options):
        if self.fault == "start":
            raise RuntimeError("planted")

    def draft(self, texts, slots, limits):
        newest = texts.token_ids[slots, (texts.lengths[slots] - 1).clamp(min=0).long()]
        if self.fault == "draft":
            raise RuntimeError("planted")
        if self.fault == "wait":
            newest[0].item()
        if self.fault == "token":
            newest = newest + 1_000_000
        if self.fault == "shape":
            newest = newest[:1]
        num_draft = limits + 100 if self.fault == "length" else limits
        return Draft(newest[:, None].repeat(1, self.context.max_num_draft), num_draft)
