"""Defines the classes that `worker_cls` names: vLLM's workers with the plugin's proposer in their model runner. Names
in vLLM's modules are replaced only while a runner is built; other functions are set on that runner. Permanent patches
of vLLM have the kind "patch" in vllm_api/replaced.toml."""

import copy
import logging
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_specplugins.draft import Codec, ProposerContext
from vllm_specplugins.engine.frontend.fallback import check_choice
from vllm_specplugins.engine.hooks import replaced
from vllm_specplugins.engine.messages import news_of
from vllm_specplugins.engine.metrics.export import shown_on
from vllm_specplugins.engine.metrics.port import address_of
from vllm_specplugins.engine.metrics.report import Reporter, tell_states
from vllm_specplugins.engine.profile import profile_of
from vllm_specplugins.engine.session import Session
from vllm_specplugins.engine.switch import NONE, checked_mode
from vllm_specplugins.engine.vllm_api.compat import untested_version
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.faults import cause_text, fault_of
from vllm_specplugins.isolation.guard import end_all_ranks
from vllm_specplugins.methods import behind_gate, build_proposer
from vllm_specplugins.stage import StageProposer, stage_of, stages_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.specplugins")

_BASES = {"GPUWorker": ("vllm.v1.worker.gpu_worker", "Worker"), "CPUWorker": ("vllm.v1.worker.cpu_worker", "CPUWorker")}


def __getattr__(name: str) -> Any:
    """Creates GPUWorker or CPUWorker at first use, since each base can be imported on only one platform."""
    if name not in _BASES:
        raise AttributeError(name)
    module, base = _BASES[name]
    worker = type(name, (_WithProposer, getattr(import_module(module), base)), {"__module__": __name__})
    globals()[name] = worker
    return worker


class _WithProposer:
    vllm_config: "VllmConfig"
    use_v2_model_runner: bool
    model_runner: Any
    speculative_config: Any
    _is_aside = False  # whether this step is vLLM's alone

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            from vllm_specplugins.engine.v2 import runner as runner
        else:
            from vllm_specplugins.engine.v1 import runner as runner  # type: ignore[no-redef]
        problem = ""
        try:
            with runner.while_built(self.vllm_config):
                super().init_device()  # type: ignore[misc]
            if not runner.is_known(self.model_runner):
                problem = f"does not support vLLM's model runner {type(self.model_runner).__name__}"
        except Exception as error:
            if untested_version() is None:
                raise
            problem = f"cannot build vLLM's model runner ({cause_text(error)})"
        if problem:
            return self._become_plain(problem)
        speculator = getattr(self.model_runner, "speculator", None)
        build = getattr(getattr(speculator, "specplugins", speculator), "new_proposer", None)
        config = self.vllm_config.speculative_config.plugin_config
        barrier = guarded_proposer(self.vllm_config, self.model_runner.device, build)
        self._session = Session(barrier, self.vllm_config.speculative_config.plan.scheduler_stage)
        runner.attach(self.model_runner, self._session)
        self._aside = runner.aside(self.model_runner)
        address = address_of(self.vllm_config) if gives_output() else None
        show = shown_on(address, self.vllm_config) if address else None
        self._reporter = Reporter(self._session, config.method, show=show)
        self._reports = bool(show) or self.vllm_config.ec_transfer_config is None  # see metrics/report.py

    def _become_plain(self, problem: str) -> None:
        """Becomes vLLM's worker, without speculation."""
        check_choice(f"vllm-specplugins {problem}")
        logger.error("vllm-specplugins %s; the server runs without speculative decoding.", problem)
        self.vllm_config = alone = copy.copy(self.vllm_config)
        alone.speculative_config = self.speculative_config = None
        self.__class__ = type(type(self).__name__, (_Plain, *type(self).__bases__[1:]), {})
        self.init_device()

    def load_model(self, **arguments: Any) -> None:
        super().load_model(**arguments)  # type: ignore[misc]
        self._session.when_loaded()  # a sleep of level 2 frees the memory that vLLM allocates in its `load_model`

    def compile_or_warm_up_model(self) -> Any:
        tell_states(self.vllm_config, self.model_runner.kv_cache_config, self._reporter.method)
        fewer: dict[str, Any] = {}
        if self.use_v2_model_runner:
            from vllm_specplugins.engine.v2 import memory

            fewer["scheduler_config"] = memory.for_warm_up(self.model_runner)
        with replaced(self._session, {"is_warming_up": True}), replaced(self.model_runner, fewer):
            times = super().compile_or_warm_up_model()  # type: ignore[misc]
            if (proposer := stage_of(self._session.barrier.proposer)).has_gate:
                width = 1 + self.vllm_config.speculative_config.num_speculative_tokens
                max_num_tokens = self.vllm_config.scheduler_config.max_num_seqs * width
                proposer.use_profile(profile_of(self.model_runner, max_num_tokens))
        self._reporter.drop()
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        self._is_aside = self._may_stand_aside(scheduler_output)
        try:
            if self._is_aside:
                with self._aside:
                    return super().execute_model(scheduler_output)  # type: ignore[misc]
            return self._execute_model(scheduler_output)
        except Exception as error:
            _end_other_rank(error)
            raise

    def sample_tokens(self, grammar_output: Any) -> Any:
        try:
            if not self._is_aside:
                return self._sample_tokens(grammar_output)
            with self._aside:
                sample = self._sample_tokens if self._reporter.is_due() else super().sample_tokens  # type: ignore[misc]
                return sample(grammar_output)
        except Exception as error:
            _end_other_rank(error)
            raise

    def _may_stand_aside(self, scheduler_output: Any) -> bool:
        """Whether a step has nothing for us, as drafting is off and was off."""
        news = news_of(scheduler_output)
        is_known = news.is_off and self._reporter.is_off and news.sums is None
        return is_known and not scheduler_output.finished_req_ids and scheduler_output.total_num_scheduled_tokens > 0

    def _execute_model(self, scheduler_output: Any) -> Any:
        news = news_of(scheduler_output)
        self._session.read(news)
        if scheduler_output.finished_req_ids:  # before a new request gets the slot of a finished one
            self._reporter.forget(scheduler_output.finished_req_ids)
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        is_idle = scheduler_output.total_num_scheduled_tokens == 0  # possibly for hours
        if is_idle:
            self._session.totals()  # begins to copy the device's counts
            self._session.settle()
        self._reporter.steps.add(news.sums)
        self._reporter.is_off = news.is_off
        if output is None or not is_idle or not self._reports:
            return output
        return self._reporter.attach(output, is_last=True)

    def _sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        self._session.log()
        if output is None:
            return None
        self._reporter.note(getattr(output, "model_runner_output", output))
        return self._reporter.attach(output) if self._reports else output

    def shutdown(self) -> None:
        """Saves the files of the stages before vLLM ends, possibly before `init_device` has run."""
        try:
            if hasattr(self, "_session"):
                self._session.settle()
            for _, stage in self._stages() if hasattr(self, "_reporter") else ():
                stage.close()
        except Exception as error:
            logger.error("Shutdown: the engine cannot save the files of proposers (%s).", cause_text(error))
        finally:
            super().shutdown()  # type: ignore[misc]

    def _stages(self) -> list[tuple[str, StageProposer]]:
        stages = stages_of(self._session.barrier.proposer, f"0 {self._reporter.method}")
        return [(name, stage_of(stage)) for name, stage in stages]

    def update_max_model_len(self, max_model_len: int) -> None:
        """Limits drafts to the context that vLLM fits to its memory (`--max-model-len auto`)."""
        super().update_max_model_len(max_model_len)  # type: ignore[misc]
        for _, stage in self._stages():
            stage.set_max_model_len(max_model_len)

    def specplugins_stats(self) -> dict[str, Any]:
        """Returns the plugin's counters (counters.Counters) as a dictionary, for `LLM.collective_rpc`."""
        self._session.totals()  # begins to copy the device's counts
        return asdict(self._session.net_totals())

    def specplugins_gate(self, mode: str) -> str:
        """Switches all drafting of a running engine off ("none") or on ("auto"), for `LLM.collective_rpc` and POST
        /collective_rpc; see engine/switch.py. Raises ValueError for another mode."""
        return checked_mode(mode, self.vllm_config.parallel_config.data_parallel_size)

    def specplugins_paused(self, ms: float) -> None:
        """Subtracts a pause of the engine from the gate's step times, for `LLM.collective_rpc`."""
        self._session.paused_ms += ms

    def specplugins_store(self, action: str = "stats") -> dict[str, dict[str, int]]:
        """Returns the sizes of the stores of earlier outputs by stage, after the action "reset", "save" or "stats" (no
        action), for `LLM.collective_rpc("specplugins_store", args=("reset",))`. Raises ValueError for another
        action."""
        if action not in ("stats", "reset", "save"):
            raise ValueError(f"action must be 'stats', 'reset' or 'save', not {action!r}.")
        self._session.settle()
        stats = {}
        for name, stage in self._stages():
            if action == "reset":
                stage.reset_store()
            if action == "save":
                stage.save_store()
            stats[name] = stage.store_stats()
        return {name: its for name, its in stats.items() if its}


def _end_other_rank(error: Exception) -> None:
    """Ends the process of a rank that fails and does not return the output. Otherwise vLLM would log the exception and
    continue with wrong tokens."""
    if not gives_output():
        end_all_ranks("A step", fault_of(error, ()))


class _Plain:
    """vLLM's worker, which reports that it does not draft."""

    def specplugins_gate(self, mode: str) -> str:
        return NONE


def gives_output() -> bool:
    """Returns whether this rank returns a step's output to vLLM. This rank drafts for the others and saves files."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    pp_group = get_pp_group()
    return bool(get_tp_group().rank_in_group == 0 and pp_group.rank_in_group + 1 == pp_group.world_size)


def guarded_proposer(vllm_config: "VllmConfig", device: Any, build: Any = None) -> FaultBarrier:
    """Returns the proposer with its fault barrier. A speculator that drafts on the device passes `build`."""
    speculative_config = vllm_config.speculative_config
    config, context = speculative_config.plugin_config, context_of(vllm_config, device)
    if not speculative_config.plan.on_device:
        config = behind_gate(config)
    # A call of the target belongs to the engine's thread and stream; a cascade runs stages in threads.
    in_thread = not (speculative_config.runs_target or config.stages) and (not build or speculative_config.plan.is_late)
    return FaultBarrier(
        (build or build_proposer)(config, context),
        context.vocab_size,
        context.max_num_draft,
        time_budget_ms=config.common.time_budget_ms if in_thread else None,
        name=config.method,
        ends_process=speculative_config.runs_target and context.num_ranks > 1,
    )


def context_of(vllm_config: "VllmConfig", device: Any) -> ProposerContext:
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.tokenizers import cached_tokenizer_from_config

    speculative_config, model_config = vllm_config.speculative_config, vllm_config.model_config
    common, group = speculative_config.plugin_config.common, get_tp_group()
    index = vllm_config.parallel_config.data_parallel_index

    def tokenize(text: str) -> list[int]:
        return cached_tokenizer_from_config(model_config).encode(text, add_special_tokens=False)

    def codec() -> Codec:
        from vllm_specplugins.engine.codec import TextCodec

        return TextCodec(cached_tokenizer_from_config(model_config), model_config.get_vocab_size())

    context = ProposerContext(
        vocab_size=model_config.get_vocab_size(),
        max_model_len=model_config.max_model_len,
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        max_num_draft=common.num_speculative_tokens,
        tokenize=tokenize,
        codec=codec,
        device=device,
        dtype=model_config.dtype,
        time_budget_ms=common.time_budget_ms,
        num_ranks=group.world_size,
        file_suffix=(f".dp{index}" if index else "") if gives_output() else None,
    )
    if not (speculative_config.runs_target and group.world_size > 1):
        return context
    # Each rank has a part of the target's layers; a proposer that runs no layers drafts on rank 0.
    return replace(context, rank=group.rank_in_group, agreed=partial(group.broadcast_object, src=0))
