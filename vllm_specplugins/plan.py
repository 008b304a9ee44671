"""Decides once where a method drafts, on which schedule, which component chooses the lengths of drafts, and whether
vLLM trims them. The log at the start and `doctor` print the plan; docs/compatibility.md shows it as a table."""

from dataclasses import dataclass
from enum import Enum

from vllm_specplugins.config import ConfigError, SpecConfig, methods_of
from vllm_specplugins.methods import drafters, drafts_late, forces_tokens, is_custom_on_device, method_of, runs_target

# The plugin's schedulers, for vLLM's field `scheduler_cls`.
CHOOSING = "vllm_specplugins.engine.scheduler.ChoosingScheduler"
PLANNED = "vllm_specplugins.engine.scheduler.PlannedScheduler"
GRAMMAR = "vllm_specplugins.engine.grammar.scheduler.GrammarScheduler"

# The plugin's speculators for Model Runner V2.
ON_HOST = "vllm_specplugins.engine.v2.speculators.host:HostSpeculator"
ON_DEVICE = "vllm_specplugins.engine.v2.speculators.device:DeviceSpeculator"
TREES = "vllm_specplugins.engine.v2.trees.speculator:TreeSpeculator"
LOOKAHEAD = "vllm_specplugins.engine.v2.trees.lookahead:LookaheadSpeculator"


class Place(Enum):
    HOST = "on the host"
    EAGER = "on the device, without CUDA graphs"
    GRAPH = "on the device, in CUDA graphs"


class Chooser(Enum):
    SCHEDULER = "the scheduler sets draft lengths"
    GATE = "the gate sets draft lengths"
    NOTHING = "drafts have their full length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Facts about an engine, with vLLM's names. The defaults describe one GPU without restrictions. `asked_async` is
    the user's `async_scheduling`. `untrimmed_for` is the reason why vLLM's adaptive verification cannot trim drafts, if
    there is one."""

    use_v2_model_runner: bool = True
    asked_async: bool | None = None
    async_scheduling: bool = True
    scheduler_cls: object = None
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    world_size: int = 1
    has_full_cudagraphs: bool = True
    has_lora: bool = False
    untrimmed_for: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a method in an engine. As a string it is the log line at the start.

    Args:
        host_reason: why steps wait for drafts on the host; None: drafts are made on the device.
        is_late: a thread on the host also drafts, from tokens that are one or two steps old, and no step waits for it.
        schedule: the schedule in words, with the reason for it.
        scheduler: the plugin's scheduler; None: the user's scheduler.
        speculator: the plugin's speculator, on Model Runner V2.
        untrimmed_for: why the device does not trim drafts; None: vLLM's adaptive verification trims them there.
        scheduler_stage: the index of the stage whose tokens the scheduler adds after the drafts of the others, if any.
        scheduler_alone: whether there are no others.
    """

    place: Place
    host_reason: str | None
    is_late: bool
    is_async: bool
    schedule: str
    scheduler: str | None
    speculator: str
    chooser: Chooser
    untrimmed_for: str | None
    scheduler_stage: int | None
    scheduler_alone: bool

    @property
    def on_device(self) -> bool:
        return self.place is not Place.HOST

    @property
    def branches(self) -> bool:
        """Returns whether drafts may branch."""
        return self.speculator in (TREES, LOOKAHEAD)

    @property
    def scheduler_chooses(self) -> bool:
        return self.chooser is Chooser.SCHEDULER

    @property
    def trims(self) -> bool:
        return self.untrimmed_for is None

    def __str__(self) -> str:
        late = ", and also in a thread on the host" if self.is_late else ""
        trimmed = "trimming on the device" if self.trims else f"no trimming on the device ({self.untrimmed_for})"
        return f"drafts {self.place.value}{late}; {self.schedule}; {self.chooser.value}; {trimmed}."


def make_plan(config: SpecConfig, engine: Conditions) -> Plan:
    """Returns the plan of a method in an engine. Raises ConfigError if the method does not support the user's
    schedule."""
    host_reason = _host_reason(config, engine)
    on_device = engine.use_v2_model_runner and host_reason is None
    has_graphs = engine.has_full_cudagraphs and not (engine.has_lora and runs_target(config))
    forces = forces_tokens(config)
    is_async, schedule = _schedule(engine, host_reason is not None, any(forces))
    return Plan(
        place=(Place.GRAPH if has_graphs else Place.EAGER) if on_device else Place.HOST,
        host_reason=host_reason if engine.use_v2_model_runner else "Model Runner V1 drafts there",
        is_late=on_device and drafts_late(config),
        is_async=is_async,
        schedule=schedule,
        scheduler=_scheduler(config, engine, is_async),
        speculator=_speculator(config, on_device),
        chooser=_chooser(config, engine, on_device),
        untrimmed_for=_untrimmed_for(config, engine, on_device),
        scheduler_stage=forces.index(True) if any(forces) else None,
        scheduler_alone=all(forces),
    )


def _speculator(config: SpecConfig, on_device: bool) -> str:
    if not config.longest_chain:
        return ON_DEVICE if on_device else ON_HOST
    return LOOKAHEAD if "lookahead" in methods_of(config) else TREES


def wanted_schedule(config: SpecConfig, asked_async: bool | None, pipeline_parallel_size: int) -> bool | None:
    """Returns the `async_scheduling` to request from vLLM before the engine is known; None leaves the choice to
    vLLM."""
    waits = pipeline_parallel_size == 1 and _host_reason(config, Conditions()) is not None
    return False if asked_async is None and waits else asked_async


def _host_reason(config: SpecConfig, engine: Conditions) -> str | None:
    rows, is_late = [row for row, _ in drafters(config)], drafts_late(config)
    if config.stages:
        can = rows[0].is_lookup and len(rows) == 2 and rows[1].may_follow
    else:
        can = rows[0].runs_target or rows[0].is_lookup or is_late or is_custom_on_device(config)
    if not (can or config.longest_chain):
        return "it reads tokens there"
    if not (config.stages or is_late):
        return None
    if not engine.use_v2_model_runner or engine.world_size != engine.tensor_parallel_size:
        return "device drafting needs Model Runner V2 without a pipeline"
    if is_late and not (engine.async_scheduling and engine.scheduler_cls is None):
        return "its late drafts need asynchronous scheduling by vLLM's scheduler"
    if is_late and not rows[0].is_late and engine.world_size > 1:
        return "its thread may draw random numbers, which must be equal on all ranks"
    if rows[-1].runs_target and not config.longest_chain and engine.untrimmed_for is not None:
        return f"the device cannot trim its drafts: {engine.untrimmed_for}"
    return None


def _schedule(engine: Conditions, reads_on_host: bool, forces: bool) -> tuple[bool, str]:
    """Returns whether steps are scheduled asynchronously, and why. A scheduler that waits for the host knows the actual
    lengths of drafts. A pipeline is never synchronous: vLLM would plan drafts for a request before its last step is
    over."""
    if engine.asked_async is not None:
        kind = "asynchronous" if engine.async_scheduling else "synchronous"
        changed = engine.asked_async is not engine.async_scheduling
        why = "vLLM changed async_scheduling" if changed else "async_scheduling is set"
        return engine.async_scheduling, f"{kind} scheduling ({why})"
    if reads_on_host and engine.pipeline_parallel_size == 1:
        reason = "required by grammar" if forces else "it reads tokens on the host"
    elif not engine.use_v2_model_runner:
        reason = "Model Runner V1 needs the drafts to plan a step"
    elif engine.scheduler_cls is not None:
        reason = "scheduler_cls is set"
    elif not engine.async_scheduling:
        reason = "vLLM chose this"
    else:
        return True, "asynchronous scheduling"
    return False, f"synchronous scheduling ({reason})"


def _scheduler(config: SpecConfig, engine: Conditions, is_async: bool) -> str | None:
    """Returns the plugin's scheduler if the user sets none. Raises ConfigError if the method cannot run with the user's
    choices."""
    method, theirs, num_stages = config.method, engine.scheduler_cls, engine.pipeline_parallel_size
    forces = any(forces_tokens(config))
    if forces and (is_async or theirs is not None):
        raise ConfigError(
            f"{method}: remove async_scheduling ({is_async}) and scheduler_cls ({theirs!r}): grammar needs all earlier "
            "tokens before a step."
        )
    if not is_async and num_stages > 1:
        raise ConfigError(
            f"{method}: pipeline_parallel_size must be 1 without async_scheduling, not {num_stages}: vLLM would plan "
            "drafts before a request's last step ends."
        )
    if is_async and not engine.use_v2_model_runner:
        raise ConfigError(f"{method}: async_scheduling must be false on Model Runner V1, not True.")
    if is_async and theirs is not None:
        raise ConfigError(
            f"{method}: remove scheduler_cls ({theirs!r}) or async_scheduling: both choose the scheduler."
        )
    if theirs is not None:
        return None
    return PLANNED if is_async else GRAMMAR if forces else CHOOSING


def _chooser(config: SpecConfig, engine: Conditions, on_device: bool) -> Chooser:
    if config.common.gate == "off":
        return Chooser.NOTHING
    if not on_device:
        return Chooser.GATE
    # Engines of a mixture of experts run each layer together, so an engine that drafts less waits for the others.
    is_alone = engine.pipeline_parallel_size == engine.data_parallel_size == 1
    return Chooser.SCHEDULER if is_alone else Chooser.NOTHING


def _untrimmed_for(config: SpecConfig, engine: Conditions, on_device: bool) -> str | None:
    if not (on_device and method_of(config.method).rates_drafts):
        return "drafts have exact lengths"
    if config.longest_chain:
        return "a tree is verified as a whole"
    return 'gate is "off"' if config.common.gate == "off" else engine.untrimmed_for
