"""What is sampled has the distribution of no speculation: by chi-squared against what is computed exactly, in cells of
`verify-lossless`, of engines as users start them, in graphs and with trees; and planted errors are seen.

A row of the table is a method, the parameters of its samples, how many are enough, and how its engine runs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import generate
from conftest import ALL, EXAMPLES, INTERPRETED, RUNNER, graphs, long, spec_metrics
from eagle_heads import eagle_head, mtp_model, parallel_head
from families import FAMILIES, make_model
from parts import learner_of, swaps_weights, with_embeddings, write_head
from prompts import load_prompts
from recorded import drafts_pay, replays, runner, verified
from test_trees import exit_tree, merged_tree, rounds_tree
from transformers import AutoTokenizer, Qwen2Config
from tree_attention import attend_by_reference
from vllm_specplugins.kernels import rejection
from vllm_specplugins.kernels.rejection import reference

from vllm_specplugins.engine.harness.samples import SETTINGS, Drawn, draw
from vllm_specplugins.isolation import faults
from vllm_specplugins.proposers import draft_sampler
from vllm_specplugins.tools import verify_lossless
from vllm_specplugins.tools.lossless import grid
from vllm_specplugins.tools.lossless.grid import BIAS, CUTS, METHODS, PENALTIES, REWARDS, TOP_K, TOP_P, Cell, cell
from vllm_specplugins.tools.lossless.model import write_checkpoint, write_parts
from vllm_specplugins.tools.lossless.report import PASSED, WRONG, Judged, Report
from vllm_specplugins.tools.verify_lossless import NO_SPECULATION, Verification

pytestmark = pytest.mark.slow
WITHOUT_TAPES = "64 samples a step take minutes in Triton's interpreter; rows in graphs have a simulated device"
WARM, CUT = [cell(1.0)], [cell(0.8, TOP_P)]
SOME, KINDS = (0.0, 1.0), {"greedy": "", "probabilistic": "-probabilistic", "coupled": "-coupled"}
LOOKAHEAD = {"method": "lookahead", "window": 2, "ngram": 3, "guesses": 2, "gate": "off"}
Config = dict[str, Any] | Callable[[Path], dict[str, Any]]  # of a folder for trained parts
# Families: the target of `verify-lossless`, and one of which there are targets with a layer for `mtp`.
TINY, OF_MTP = "tiny", "tiny qwen2"
DRAFTERS = "eagle3", "mtp", "dflash", "dspark"  # the last two are V2's
Judge = Callable[..., tuple[Any, list[tuple[Judged, str]]]]


class Row(NamedTuple):
    config: Config
    cells: list[Cell]
    num_samples: int
    accepted: tuple[float, float] = SOME  # the smallest and the largest share of drafted tokens
    runs: str = "eagerly"  # or "in graphs", "a tree"
    family: str = ""  # of the target, which holds its drafter; else it is verify-lossless's


def sampled(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "num_speculative_tokens": 2, "draft_sample_method": "probabilistic", "gate": "off"}


def exit_of(layer: int) -> dict[str, Any]:
    return sampled({"method": "early_exit", "exit_layer": layer})


def jump_that_learns(folder: Path) -> dict[str, Any]:
    return sampled(write_head(folder / "learns", 0, 2, 0.05, num_layers=2, hidden_size=64)) | {"learn": True}


def after_lookup(method: str) -> Callable[[Path], dict[str, Any]]:
    """A cascade of a lookup and a drafter of vLLM's; on V2 of short drafts, which the device may trim."""

    def config(folder: Path) -> dict[str, Any]:
        made = dict(METHODS["cascade-eagle"])
        own = {**made["stages"][1], "method": method, "model": f"MADE/{method}"}
        if method == "mtp":
            del own["model"]
        elif method in DRAFTERS:
            own["model"] = str((eagle_head if method == "eagle3" else parallel_head)(method, TINY))
        if RUNNER == "v2":
            del made["gate"]
            own["num_speculative_tokens"], made["num_speculative_tokens"] = 3, 6
        return {**made, "stages": [made["stages"][0], own]}

    return config


def ahead_of_all(folder: Path) -> dict[str, Any]:
    return sampled(with_embeddings(folder / "ahead", 2, 2, hidden_size=64))


def of_drafter(method: str, *rest: Any) -> Row:
    return Row(after_lookup(method), *rest, family=OF_MTP if method == "mtp" else "")


if RUNNER == "v1":
    EACH = [cell(0.0, PENALTIES), *grid.cells()[-6:]]
    FEW = {"prompt_lookup": EACH[-2:], "cascade-verify": EACH[-2:], "jump-probabilistic": EACH}
    ROWS = {name: Row(METHODS[name], cells, 500) for name, cells in FEW.items()}
    ROWS |= {name: Row(config, EACH, 500) for name, config in METHODS.items() if ALL}
    ROWS |= {f"cascade-{name}": of_drafter(name, EACH, 500) for name in DRAFTERS[:2] if ALL}
    ROWS |= {f"exit, {kind}": Row(METHODS[f"early_exit{end}"], CUT, 1500) for kind, end in KINDS.items()}
else:  # an interpreted step takes a tenth of a second, and more with many requests
    ROWS = {
        "verify": Row(METHODS["cascade-verify"], [cell(1.0, CUTS, PENALTIES, BIAS)], 200),
        "exit": Row(exit_of(1), WARM, 72, (0.1, 0.9), "in graphs"),
        # A graph that keeps the noise that it was recorded with would be right about all of these, but not by chance.
        "all layers": Row(exit_of(2), WARM, 72, (1.0, 1.0), "in graphs"),
        "the last layer": Row(sampled({"method": "early_exit", "layers": [1]}), WARM, 72, SOME, "in graphs"),
        "learning jump": Row(jump_that_learns, WARM, 72, (0.05, 0.9), "in graphs"),
        "look-ahead": Row(ahead_of_all, WARM, 72, (0.5, 0.9), "in graphs"),  # each first token is the target's
        "tree": Row(exit_tree(4, 1), WARM, 400, SOME, "a tree"),
        "rounds": Row(rounds_tree(4, 1), [cell(0.8), cell(1.0)], 400, SOME, "a tree"),
        "lookahead": Row(LOOKAHEAD, [cell(0.8)], 400, (0.0, 0.5), "a tree"),
        "merged tree": Row(merged_tree(4, 1), WARM, 400, SOME, "a tree"),
        **{
            f"cascade-{name}": of_drafter(name, WARM, 200, SOME, "in graphs")
            for name in ("draft_model", "eagle", *DRAFTERS)
        },
    }
IN_CI = ROWS if RUNNER == "v1" else ("verify", "exit", "tree", "rounds")


@pytest.fixture(scope="module")
def judge(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """judge(row, arguments of LLM): its engine, and each cell with its verdict."""
    folder = tmp_path_factory.mktemp("tiny")
    model = write_checkpoint(folder, seed=0)
    write_parts(folder, seed=0)

    def judge(row: Row, watch: Callable[[Any], None] = lambda llm: None, **more: Any) -> Any:
        config = grid.placed(row.config(folder) if callable(row.config) else row.config, folder)
        of_row = (make_model(row.family), mtp_model(row.family)) if row.family else (model, folder)
        settings = {**SETTINGS, "model": str(of_row[1]), "seed": 0, "max_num_seqs": 64 if INTERPRETED else 256, **more}
        if in_graphs := row.runs == "in graphs":
            settings |= {"max_num_seqs": 8, **graphs((1, 8, 8 * (1 + config["num_speculative_tokens"])))}
        verification = Verification(of_row[0], row.cells, row.num_samples, 0, lambda: None)
        plain = [Judged(NO_SPECULATION, "")]
        if any(cell.is_greedy for cell in row.cells):
            plain = verification.judge(partial(draw, engine(**settings)), NO_SPECULATION)
        llm = engine(config, **settings)
        watch(llm)
        judged = verification.judge(partial(in_batches if in_graphs else draw, llm), "ours")
        return llm, list(zip(judged, Report([*plain, *judged], {}).verdicts[len(plain) :], strict=True))

    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(FAMILIES, TINY, model.config)
        patches.setitem(FAMILIES, OF_MTP, Qwen2Config(**{**model.config.to_dict(), "model_type": "qwen2"}))
        yield judge


@contextmanager
def prepared(row: Row, engine: Any) -> Iterator[None]:
    """With a simulated device for graphs, and attention for trees."""
    if row.runs == "eagerly":
        yield
        return
    from simulated_device.device import simulated_device
    from simulated_device.references import patch_verification

    engine.stop()
    device = simulated_device(is_cuda=True) if row.runs == "in graphs" else nullcontext()
    with device, pytest.MonkeyPatch.context() as patches:
        patch_verification(patches)
        if row.runs == "a tree":
            attend_by_reference(patches)
        yield
        engine.stop()


def in_batches(llm: Any, requests: Any) -> Drawn:
    """Of 1 to 8 requests, most with rows of padding; all replay graphs of drafts, and of the target where its graphs
    hold drafts of all lengths."""
    target, speculator = runner(llm).cudagraph_manager, runner(llm).speculator
    drafts = getattr(speculator, "specplugins", speculator)._graphs_of.values()
    is_uniform = hasattr(speculator, "specplugins") and runner(llm).adaptive_verification is None
    rest, drawn = iter(requests), list[Drawn]()
    for size in cycle(range(1, 9)):
        if not (batch := list(islice(rest, size))):
            break
        before = replays(target), sum(map(replays, drafts))
        drawn.append(draw(llm, batch))
        assert sum(map(replays, drafts)) > before[1] and (is_uniform or replays(target) > before[0])
    assert replays(target) > 0
    token_ids = [outputs for own in drawn for outputs in own.token_ids]
    return Drawn(token_ids, sum(own.num_drafted for own in drawn), sum(own.num_accepted for own in drawn))


@pytest.mark.parametrize("name", [name if name in IN_CI else long(name) for name in ROWS])
def test_distribution(name: str, judge: Judge, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: an exact distribution that is not vLLM's, drafts that nobody counts; a q that is not the one that was
    drawn from, of other weights or of another token of a pass, one that the graph did not write, or that a row of
    padding has written to; noise that a graph keeps; drafted positions at another temperature or top-p; a token of a
    tree, or of a drafter of vLLM's, that is verified as if it had been drawn from something."""
    row, num_steps, lengths = ROWS[name], [0], list[dict[str, int]]()

    def watch(llm: Any) -> None:
        nonlocal lengths
        if name == "learning jump":
            learner_of(llm)
            num_steps[:] = [swaps_weights(monkeypatch, scale=0.1)]  # type: ignore[list-item]
        if name.startswith("cascade") and getattr(runner(llm), "adaptive_verification", None):
            drafts_pay(llm, token_ms=0.1)
            lengths = stack.enter_context(verified(llm))

    if row.runs == "in graphs":  # so few samples are of one prompt, and requests of their own
        monkeypatch.setattr(verify_lossless, "NUM_PROMPTS", 1)
        monkeypatch.setattr(grid, "PER_TURN", 1)
    with prepared(row, engine), ExitStack() as stack:
        llm, judged = judge(row, watch)
        assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}
    are_ragged = [len(set(own.values())) > 1 for own in lengths]
    assert any(are_ragged) or not lengths, "drafts of several lengths are verified together"
    for own, verdict in judged:
        assert verdict == PASSED, own
        share, (least, most) = own.num_accepted / own.num_drafted, row.accepted
        assert least < share < most or share == least == most, own


@pytest.mark.long
@pytest.mark.skipif(RUNNER == "v1", reason="trees are V2's")
def test_rounds_emit_more(engine: Any) -> None:
    """Tokens per step of the demo model at temperature 1, beside coupled trees, which a play has at 1.09. Kills:
    siblings that are tried with the noise or the place of others, and are right too rarely."""
    model, kinds, lengths = EXAMPLES / "demo" / "model", {"coupled": exit_tree, "probabilistic": rounds_tree}, []
    texts = map(AutoTokenizer.from_pretrained(model).encode, load_prompts("continue", 60))
    prompts = [text[-192:] for text in texts if len(text) >= 192][:48]
    for method, kind in kinds.items():
        with prepared(ROWS["rounds"], engine):
            config = kind(15, 1, draft_sample_method=method)
            llm = engine(config, model=str(model), max_num_seqs=len(prompts), num_gpu_blocks_override=512)
            for _ in range(8):
                before = spec_metrics(llm)
                generate(llm, prompts, [len(prompts)], temperature=1.0, max_tokens=40)
                drafts, accepted = (spec_metrics(llm)[name] - before[name] for name in ("drafts", "accepted_tokens"))
                lengths.append(1 + accepted / drafts)
    coupled, in_rounds = torch.tensor(lengths).view(2, -1)
    error = ((coupled.var() + in_rounds.var()) / len(coupled)).sqrt() / coupled.mean()
    gain = in_rounds.mean() / coupled.mean()
    print(f"{coupled.mean():.3f} and {in_rounds.mean():.3f} tokens a step, {gain:.3f}x, standard error {error:.3f}")
    assert gain > 1.02


def accept_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts with min(1, p / q) + 0.02."""
    right = reference.draft_ratio
    monkeypatch.setattr(reference, "draft_ratio", lambda p, q: right(p, q) + 0.02)


def recover_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the recovered token from p instead of the residual."""
    monkeypatch.setattr(reference, "residual", lambda p, *_: p)


def another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """q of twice the temperature."""

    def wrong(*arguments: Any) -> Any:
        draft_logits = arguments[7] if len(arguments) > 7 else None
        return rejection.rejection_sample(*arguments[:7], None if draft_logits is None else draft_logits / 2)

    monkeypatch.setattr("vllm_specplugins.engine.v1.verify.rejection_sample", wrong)


def forget_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties do not count the step's drafts."""
    from vllm_specplugins.engine.v1 import edits

    right = edits.adjust

    def wrong(logits: Any, cu_num_logits: Any, draft_token_ids: Any, *rest: Any) -> Any:
        return right(logits, cu_num_logits, torch.full_like(draft_token_ids, -1), *rest)

    monkeypatch.setattr(edits, "adjust", wrong)


def see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a tree do."""
    from vllm_specplugins.engine.v2.trees.state import Trees

    put = Trees.put
    monkeypatch.setattr(Trees, "put", lambda own, *tree: (put(own, *tree), own._ancestors.copy_((2 << own._nodes) - 1)))


def take_another_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings are tried with q of another depth."""
    from vllm_specplugins.engine.v2.trees import state

    right = state.in_rounds
    monkeypatch.setattr(state, "in_rounds", lambda *args: right(*args[:5], args[5].roll(1, dims=1), *args[6:]))


EXIT = METHODS["early_exit-probabilistic"]
PLANTED = {
    accept_more: Row(EXIT, [cell(1.5, TOP_K)], 300 if INTERPRETED else 1500),
    another_temperature: Row(EXIT, WARM, 1500),
    recover_from_p: Row(EXIT, WARM, 1500),
    forget_drafts: Row(EXIT, [cell(1.0, REWARDS)], 1500),
    see_each_other: Row(exit_tree(4, 1), WARM, 400, SOME, "a tree"),
    take_another_q: Row(rounds_tree(4, 1), WARM, 400, SOME, "a tree"),
}
OF_TREES = {see_each_other: [pytest.mark.long], take_another_q: [pytest.mark.long]}
OF_V2 = {accept_more: [], **OF_TREES}  # too few samples are drawn there to see the others
PLANTS = [p for p in PLANTED if p in OF_V2] if INTERPRETED else [p for p in PLANTED if p not in OF_TREES]


@pytest.mark.skipif(RUNNER == "v2" and not INTERPRETED, reason="plants its errors into what runs on a CPU")
@pytest.mark.parametrize(
    "plant", [pytest.param(p, marks=OF_V2.get(p, [])) for p in PLANTS], ids=lambda plant: plant.__name__
)
def test_planted_errors_are_caught(plant: Any, judge: Judge, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a grid, a number of samples or a test that these errors slip through."""
    plant(monkeypatch)
    with prepared(PLANTED[plant], engine):
        _, [(judged, verdict)] = judge(PLANTED[plant])
    assert verdict == WRONG, judged


def test_one_token_left(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose blocks are all cached, but for its last token. Kills: drafts of a step that computes so little
    verified with another's q; the scheduler's padding, ids of -1, verified as the last token of the vocabulary."""
    prompt, num_samples = ([3, 7, 1, 0, 5, 9, 2] * 5)[:33], 300 if INTERPRETED else 1500
    monkeypatch.setattr(grid, "make_prompts", lambda seed, count: [prompt])

    def watch(llm: Any) -> None:
        draw(llm, [grid.Request(prompt, {"max_tokens": 1})])

    llm, [(judged, verdict)] = judge(Row(EXIT, CUT, num_samples), watch, enable_prefix_caching=True)
    assert verdict == PASSED and 0 < judged.num_accepted < judged.num_drafted, judged
    [cached] = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits"]
    assert cached >= num_samples * 32


def test_drafts_of_no_distribution(judge: Judge, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is drawn from logits with NaN. Kills: a token of such a draft that comes out; a fault that is not
    counted."""
    right = draft_sampler.sample_with_q

    def broken(logits: torch.Tensor, positions: torch.Tensor, own: Any) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, q = right(logits, positions, own)
        return token_ids, torch.where(torch.arange(q.shape[-1]) == 3, torch.nan, q)

    engine.stop()
    monkeypatch.setattr(draft_sampler, "sample_with_q", broken)
    monkeypatch.setattr(faults.CircuitBreaker, "add_fault", lambda self: None)  # it goes on
    num_samples = 160 if INTERPRETED else 1500
    llm, [(judged, _)] = judge(Row(EXIT, WARM, num_samples))
    assert judged.test.p_value > 1e-4 and spec_metrics(llm)["accepted_tokens"] == 0, judged
    llm.collective_rpc("specplugins_stats")  # what is counted on a device is read when the next report is due
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"]["drew from logits that are not finite"] >= 2 * num_samples
    engine.stop()
