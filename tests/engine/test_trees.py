"""Trees of drafts on Model Runner V2: outputs are those of no speculation, whatever a scheduler does to requests."""

from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import NUM_TOKENS, STRESS, check_ends, early_exit, generate
from conftest import DEMO_MODEL, NUM_LAYERS, RUNNER, TAPES, long, spec_metrics
from parts import medusa, write_head
from recorded import replays, runner
from test_identity import steps_of
from tree_attention import attend_by_reference

from vllm_specplugins.config import ConfigError
from vllm_specplugins.config.trees import chain_length
from vllm_specplugins.engine.hooks import both
from vllm_specplugins.engine.messages import news_of
from vllm_specplugins.engine.trees import check_trees

on_v2 = pytest.mark.skipif(RUNNER != "v2", reason="trees are V2's")
N = 7
LOOKAHEAD = {"method": "lookahead", "window": 2, "ngram": 3, "guesses": 1}


def exit_tree(num_nodes: int = N, layer: int = NUM_LAYERS // 2, **other: Any) -> dict[str, Any]:
    config = {key: value for key, value in early_exit(layer).items() if key != "num_speculative_tokens"}
    return {**config, "tree": num_nodes, "gate": "off", **other}


def rounds_tree(num_nodes: int = N, layer: int = NUM_LAYERS // 2, **other: Any) -> dict[str, Any]:
    return exit_tree(num_nodes, layer, **{"rejection": "rounds", "draft_sample_method": "probabilistic", **other})


def merged_tree(num_nodes: int = N, layer: int = NUM_LAYERS // 2, **other: Any) -> dict[str, Any]:
    stages = [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": layer}]
    return {"method": "cascade", "stages": stages, "tree": num_nodes, "gate": "off", **other}


KINDS = pytest.mark.parametrize("kind", [exit_tree, merged_tree])


@pytest.fixture(scope="module")
def attention(expected: Any) -> Iterator[None]:
    """A CPU's platform has one attention, which is that of trees here; after what is expected, which is vLLM's."""
    with pytest.MonkeyPatch.context() as patches:
        attend_by_reference(patches)
        yield


def check(llm: Any, least: int) -> None:
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {}
    assert spec_metrics(llm)["accepted_tokens"] >= least


@on_v2
@pytest.mark.parametrize(
    ("kind", "asynchronous"), [long(exit_tree, False), (exit_tree, True), long(rounds_tree, True), (merged_tree, True)]
)
def test_exit(attention: None, engine: Any, prompts: Any, expected: Any, kind: Any, asynchronous: bool) -> None:
    """Preemption, prefix-cache hits on blocks whose paths were moved, chunked prefill; one start is as with default
    memory. Kills: a wrong mask, position, node, or place that a path is moved to; a path that is moved twice; graphs or
    a KV cache that outlive vLLM's profile, and graphs that its estimate leaves out; a warm-up that trees fail in."""
    from vllm_specplugins.engine.v2.verification.self_check import warm_up

    profiles = {"additional_config": {"profiles": True}} if kind is merged_tree and TAPES else {}
    llm = engine(kind(), **STRESS, **profiles, async_scheduling=asynchronous)
    warm_up(runner(llm), runner(llm).speculator)
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    check(llm, 50)
    assert generate(llm, prompts, [3, 5], max_tokens=NUM_TOKENS) == expected, "from the prefix cache"
    assert spec_metrics(llm)["preemptions"] > 0
    check_ends(llm, prompts, expected)
    assert not TAPES or min(map(replays, (runner(llm).cudagraph_manager, runner(llm).speculator._graphs_of[N]))) > 0


def test_a_step_without_drafts_is_causal() -> None:
    """After a step with trees, too. Kills: the masks of an earlier step where a graph of prompts, which
    `cudagraph_mode` FULL records, reads masks without drafts."""
    from vllm_specplugins.engine.v2.trees.state import Trees

    scheduler = SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=16)
    trees = Trees(SimpleNamespace(scheduler_config=scheduler), 3, torch.device("cpu"))
    slots, places = torch.tensor([0, 0, 0, 0]), torch.arange(4)
    trees.put(slots[:1], torch.tensor([[0, 0, 1]]))
    facts = {"expanded_idx_mapping": slots, "expanded_local_pos": places, "logits_indices": places, "num_reqs": 1}
    lengths = {"cu_num_logits": torch.tensor([0, 4]), "seq_lens": torch.tensor([9]), "positions": places + 5}
    step = SimpleNamespace(**facts, **lengths, num_draft_tokens=3)
    trees._prepare(lambda batch: None, step)
    assert trees.bits[:4].tolist() == [1, 3, 5, 11] and trees.masks
    step.num_draft_tokens = 0
    trees._prepare(lambda batch: None, step)
    assert trees.bits.tolist() == [-1] * 16 and not trees.masks


def test_outputs_are_not_quantised() -> None:
    """Kills: a scale of FP8 weights that vLLM's compiler hands to attention, where a tree's would ignore it."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    from vllm_specplugins.engine.v2.trees.attention import TreeAttentionImpl

    impl = TreeAttentionImpl(2, 16, 1.0, 2, None, None, "auto")
    assert not impl.fused_output_quant_supported(kFp8StaticTensorSym)
    with pytest.raises(ConfigError, match="a sliding window"):
        TreeAttentionImpl(2, 16, 1.0, 2, None, None, "auto", chunk_lookback=1)


@on_v2
@pytest.mark.parametrize("fault", ["masks", "positions", "moves", "parents"])
def test_faults_are_seen(
    attention: None, engine: Any, prompts: Any, expected: Any, fault: str, monkeypatch: Any
) -> None:
    """Nodes that see each other, stand by index, or stay where they were; a walk down another tree: that prompts and
    drafts of the test above can tell. Without graphs, which would go on as they were recorded."""
    llm = engine(exit_tree(), **STRESS, async_scheduling=True, enforce_eager=True)
    trees = runner(llm).speculator.trees
    if fault == "moves":
        monkeypatch.setattr("vllm_specplugins.engine.v2.trees.state.compact", lambda *_: None)
    else:
        nodes, put = trees._nodes, trees.put

        def wrong(rows: Any, parents: Any) -> None:
            put(rows, parents)
            own, chain = trees.table_rows(rows), (nodes - 1).clamp(min=0)
            table, value = {
                "masks": (trees._ancestors, (2 << nodes) - 1),
                "positions": (trees._depths, nodes),
                "parents": (trees._parents, chain),
            }[fault]
            table[own] = value

        monkeypatch.setattr(trees, "put", wrong)
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) != expected
    check(llm, 1)


@on_v2
@KINDS
def test_what_the_gate_does(
    attention: None, engine: Any, prompts: Any, expected: Any, kind: Any, monkeypatch: Any
) -> None:
    """Trees, chains and nothing in turns. Kills: a chain that is verified as the tree before it, a draft that was not
    made, a tree that is cut to the chain before it."""
    llm, told, verified = engine(kind(gate="auto"), **STRESS, async_scheduling=True), [], []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.dynamic_sd_lookup.times.lengths == (0, 1, 2, chain_length(N), N)

    class Turns:
        def __getitem__(self, num_reqs: int) -> int:
            told.append((N, N, 2, 2, N, 0, 0, 1, 3, N)[len(told) % 10])
            return told[-1]

    update = scheduler.update_from_output

    def noted(scheduled: Any, output: Any) -> Any:
        drafts = scheduled.scheduled_spec_decode_tokens
        left = {name: own.max_tokens - own.num_output_tokens for name, own in scheduler.requests.items()}
        # At its end a request gets no whole tree any more.
        whole = [len(drafts[name]) for name in drafts if left.get(name, 0) > N + 1]
        verified.append((news_of(scheduled).verifies, *whole))
        return update(scheduled, output)

    monkeypatch.setattr(scheduler, "dynamic_sd_lookup", Turns())
    monkeypatch.setattr(scheduler, "update_from_output", noted)
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    assert spec_metrics(llm)["preemptions"] > 0
    first = [own[1:] for before, own in pairwise(verified) if own[0] == N > before[0] > 0 and len(own) > 1]
    assert first and all(max(own) == N for own in first)
    check(llm, 25)


@on_v2
def test_what_is_learned(attention: None, engine: Any, prompts: Any, monkeypatch: Any) -> None:
    """Of a lookup's chain beside what came out, whatever stood in the tree. Kills: a chain of another step or place, or
    one that is still learned from after a step without drafts."""
    llm = engine(merged_tree(gate="auto"), **STRESS, async_scheduling=True, enforce_eager=True)
    speculator = runner(llm).speculator
    texts, kept, seen = speculator.lookups.texts.histories, {}, []
    fates, draft = speculator._fates, speculator.draft

    def told(num_rows: int) -> Any:
        found = fates(num_rows)
        slots, num_sampled = speculator.outcomes.rows(num_rows)
        for row, (slot, emitted) in enumerate(zip(slots.tolist(), num_sampled.tolist(), strict=True)):
            text = texts.token_ids[slot, : texts.lengths[slot]].tolist()
            start, chain = kept.get(slot, (-1, []))
            right = next((at for at in range(emitted) if chain[at : at + 1] != text[start + at :][:1]), emitted)
            is_known = emitted > 0 and start == len(text) - emitted
            expected = (right + 1, int(right < emitted)) if is_known else (0, 0)
            assert (int(found[0][row]), int(found[1][row])) == expected
            seen.append((*expected, start))
        return found

    def drafted(batch: Any, *rest: Any) -> Any:
        drafts, slots = draft(batch, *rest), batch.slots
        learned = speculator.outcomes.learned or drafts
        for row in (speculator.idx_mapping[: len(slots)] >= 0).nonzero()[:, 0].tolist():
            kept[int(slots[row])] = int(texts.lengths[slots[row]]), learned.token_ids[row].tolist()
        return drafts

    monkeypatch.setattr(speculator, "_fates", told)
    monkeypatch.setattr(speculator, "draft", drafted)
    scheduler, turns = llm.llm_engine.engine_core.engine_core.scheduler, count()

    class Turns:
        def __getitem__(self, num_reqs: int) -> int:
            return (N, N, N, 0, 0, 0, N, 2)[next(turns) % 8]

    monkeypatch.setattr(scheduler, "dynamic_sd_lookup", Turns())
    generate(llm, prompts[:12], [6], max_tokens=NUM_TOKENS)
    assert sum(right > 2 for right, *_ in seen) > 5, "chains that were right"
    assert any(right == 0 and start > 0 for right, _, start in seen), "chains of before a step without drafts"
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {}, "of what is asserted above"
    assert stats["stages"]["0 prompt_lookup"]["accepted"] > 0


@on_v2
@pytest.mark.parametrize("method", ["jump", "medusa"])
def test_trained_parts(attention: None, engine: Any, prompts: Any, expected: Any, method: str, tmp_path: Path) -> None:
    """A jump that is exact along its chain, and heads that say again what the target has just said. Kills: a jump that
    begins with another node's state; a head for each node."""
    num_draft, is_jump = chain_length(N), method == "jump"
    part = write_head(tmp_path, NUM_LAYERS, NUM_LAYERS, 0.0) if is_jump else medusa(tmp_path, num_draft=num_draft)
    del part["num_speculative_tokens"]
    llm = engine({**part, "tree": N, "gate": "off"})
    before = spec_metrics(llm)
    assert generate(llm, prompts, [8], max_tokens=NUM_TOKENS) == expected
    after = spec_metrics(llm)
    drafts, accepted = (after[name] - before[name] for name in ("drafts", "accepted_tokens"))
    check(llm, 50 if is_jump else 1)
    assert not is_jump or accepted >= (drafts - len(prompts)) * num_draft
    check_ends(llm, prompts, expected)


def asked(llm: Any, prompts: Any, own: dict[str, Any]) -> list[Any]:
    """Tokens and least logprobs of requests, of which every other one has these parameters."""
    from vllm import SamplingParams

    common: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    params = [SamplingParams(**common, **(own if index % 2 else {})) for index in range(len(prompts))]
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [
        (list(own.token_ids), [round(min(x.logprob for x in step.values()), 3) for step in own.logprobs or ()])
        for own in (result.outputs[0] for result in results)
    ]


@on_v2
def test_what_a_tree_cannot_keep(attention: None, engine: Any, prompts: Any, monkeypatch: Any) -> None:
    """A request that has its chain beside others that have trees. Kills: a sibling whose logits are edited as if it
    stood after another, a logprob of another node's row."""
    from vllm.sampling_params import StructuredOutputsParams

    in_order = StructuredOutputsParams(regex="([a-e][f-z])+")  # the order of nodes matters
    each: list[dict[str, Any]] = [{"logprobs": 1}, {"frequency_penalty": 2.0}, {"structured_outputs": in_order}]
    plain = [asked(engine(), prompts, own) for own in each]
    llm, seen = engine(exit_tree(), **STRESS, async_scheduling=True), []
    trees = runner(llm).speculator.trees
    monkeypatch.setattr(trees, "add", both(lambda slots, branches: seen.extend(branches), trees.add))
    for own, expected in zip(each, plain, strict=True):
        seen.clear()
        assert asked(llm, prompts, own) == expected, own
        assert seen.count(False) >= 4 and seen.count(True) >= 4


@on_v2
def test_abort_and_same_id(attention: None, engine: Any, prompts: Any) -> None:
    """A request aborted in the middle, and a new one in its slot that has a chain. Kills: a tree that stays."""
    llm = engine(exit_tree(), **STRESS, async_scheduling=True)
    alone = steps_of(llm, "same-id", prompts[2], presence_penalty=0.5)[-1]
    assert steps_of(llm, "same-id", prompts[3], 5)[-1][2] is None
    assert steps_of(llm, "same-id", prompts[2], presence_penalty=0.5)[-1] == alone
    check(llm, 1)


@on_v2
@pytest.mark.parametrize("temperature", [long(0.8), 1.0])
def test_seeded_samples(attention: None, engine: Any, prompts: Any, temperature: float) -> None:
    """What a seeded request is answered is what it is answered with chains. Kills: noise of a node's index."""
    params = {"temperature": temperature, "seed": 5, "max_tokens": 16}
    chains = generate(engine(early_exit(NUM_LAYERS // 2, 2)), prompts[:4], [4], **params)
    for kind in (exit_tree, merged_tree):
        llm = engine(kind())
        before = spec_metrics(llm)["accepted_tokens"]
        assert generate(llm, prompts[:4], [4], **params) == chains
        assert spec_metrics(llm)["accepted_tokens"] > before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attention_backend": "FLASH_ATTN"}, "attention_backend must be TRITON_ATTN or left out with {}"),
        ({"kv_cache_dtype": "fp8"}, "remove {}: it is not exact, or untested, with a quantised KV cache"),
        ({"enable_lora": True}, "remove {}: it is not exact, or untested, with LoRA"),
        ({"hf_overrides": {"sliding_window": 64}}, "remove {}: it is not exact, or untested, with a sliding window"),
        ({"tensor_parallel_size": 2}, "remove {}: it is not exact, or untested, with several ranks or engines"),
        ({}, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize(("config", "word"), [(exit_tree(), "tree"), (LOOKAHEAD, "lookahead")], ids=str)
def test_refusals(
    arguments: dict[str, Any], words: str, config: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded, in one sentence. Kills: an engine that would verify by a wrong mask. Fails if trees
    are served where outputs may not depend on the batch."""
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if RUNNER == "v1":
        arguments, words = {}, "remove {}: Model Runner V1"
    settings = {"max_model_len": 512, "enforce_eager": True, **arguments}
    args = EngineArgs(model=str(DEMO_MODEL), speculative_config=config, **settings)
    if not words:
        args.attention_config.backend = AttentionBackendEnum.TRITON_ATTN
        made = args.create_engine_config()
        assert made.attention_config.backend.name == "CUSTOM"
        assert args.attention_config.backend is AttentionBackendEnum.TRITON_ATTN, "the caller's"
        made.aux_output_config.enable_return_routed_experts = True
        with pytest.raises(ConfigError, match=f"remove {word}: it is not exact, or untested, with auxiliary outputs"):
            check_trees(made)
        made.aux_output_config.enable_return_routed_experts = False
        monkeypatch.setitem(vars(envs), "VLLM_BATCH_INVARIANT", True)
        with pytest.raises(
            ConfigError, match=f"remove {word}: it is not exact, or untested, with VLLM_BATCH_INVARIANT"
        ):
            check_trees(made)
        return
    with pytest.raises(ConfigError, match=f"^{config['method']}: {words.format(word)}"):
        args.create_engine_config()
