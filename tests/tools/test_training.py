"""Training of exit heads and jumps on a tiny model."""

import argparse
import json
import resource
import shlex
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_specplugins.config import ConfigError
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.heads.exit_head import ExitHead
from vllm_specplugins.proposers.heads.jump_head import JumpHead, JumpHeadConfig, check_jump
from vllm_specplugins.proposers.heads.look_ahead import LookAhead, LookAheadConfig, check_look_ahead
from vllm_specplugins.proposers.learning.distillation import Guess, Guesser, jump_guesser, walk
from vllm_specplugins.tools.base_model import BaseModel, load_tokenizer
from vllm_specplugins.tools.data import token_rows
from vllm_specplugins.tools.training import command
from vllm_specplugins.tools.training.command import Trained
from vllm_specplugins.tools.training.core import row_batches, schedule, train
from vllm_specplugins.tools.training.kinds import (
    ExitHeadSettings,
    JumpSettings,
    LookAheadSettings,
    exit_guesser,
    initial_head,
    look_ahead_guesser,
)
from vllm_specplugins.tools.training.scores import Scores, Text, scores, write_texts

COMMON: dict[str, Any] = {"steps": 12, "batch_tokens": 128, "row_tokens": 64, "learning_rate": 0.02, "seed": 0}
SETTINGS = ExitHeadSettings(**COMMON, exit_layer=1)
JUMP = JumpSettings(**COMMON, early_layers=0, late_layer=2, inner_size=16, num_draft=2)


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> BaseModel:
    return BaseModel.load(str(tiny_model), "cpu")


@pytest.fixture(scope="module")
def rows(tiny_model: Path, text_files: list[Path]) -> list[list[int]]:
    return token_rows(text_files, load_tokenizer(str(tiny_model)), 64)


@pytest.fixture(scope="module")
def written(base: BaseModel, rows: list[list[int]]) -> list[list[int]]:
    """What the model writes: a part that learns from it is scored on the like."""
    return [text.row for heat in (0.0, 1.0) for text in write_texts(base, rows[:-8], heat)]


def score(base: BaseModel, rows: list[list[int]], guesser: Guesser, num_draft: int) -> Scores:
    return scores(base, write_texts(base, rows, 0.0), write_texts(base, rows, 1.0), guesser, num_draft)


def overlaps(base: BaseModel, rows: list[list[int]], head: Any) -> float:
    """Of a jump's two tokens, on these rows as they are: of a tiny model that has learned nothing."""
    texts = [Text(row, 1, 1.0, seed) for seed, row in enumerate(rows)]
    return sum(scores(base, [], texts, jump_guesser(base, head), 2).overlap)


def jump_head(scale: float, **config: int) -> JumpHead:
    """Of random weights."""
    torch.manual_seed(0)
    own = JumpHeadConfig(num_layers=3, hidden_size=32, rms_norm_eps=1e-5, **config)
    return JumpHead(own, {k: scale * torch.randn(like.shape) for k, like in JumpHead(own).state_dict().items()})


def test_hidden_states(base: BaseModel, rows: list[list[int]]) -> None:
    """Kills: states off by a layer or normed twice, and padding that reaches another row's tokens."""
    expected = base.model(torch.tensor([rows[0]]), output_hidden_states=True)
    batch = [rows[0], rows[1][:9], rows[0][:20]]
    whole, _, part = base.hidden_states(batch)
    assert len(whole) == 4 and all(
        torch.allclose(a, b[0], atol=1e-4) for a, b in zip(whole, expected.hidden_states, strict=True)
    )
    assert torch.allclose(base.logits(whole[-1]), expected.logits[0], atol=1e-3)
    assert torch.allclose(part[0], whole[0][:20], atol=1e-4)


def test_starts_as_the_models_own(base: BaseModel, rows: list[list[int]]) -> None:
    """Kills: a head that starts at random."""
    [states] = base.hidden_states(rows[:1])
    own = base.logits(base.model.base_model.norm(states[1]))
    assert torch.allclose(initial_head(base, 1).logits(states[1]), own, atol=own.abs().max().item() * 1e-4)


def test_learns(base: BaseModel, rows: list[list[int]], written: list[list[int]], tmp_path: Path) -> None:
    """Held-out agreement of a bad exit rises. Kills: no step taken, the wrong layer read, labels for the teacher."""
    settings = replace(SETTINGS, steps=60, batch_tokens=256)
    train(base, written, settings, tmp_path)
    heads = initial_head(base, 1), ExitHead.load(tmp_path)
    before, after = (score(base, rows[-8:], exit_guesser(base, head), 1) for head in heads)
    assert before.match[0] < 0.7 and after.match[0] > 0.9, (before, after)
    assert after.overlap[0] > before.overlap[0] + 0.1
    ExitHead.check(tmp_path, exit_layer=1, hidden_size=32, vocab_size=3072)


def test_saved_in_the_models_dtype(tiny_model: Path, rows: list[list[int]], tmp_path: Path) -> None:
    """Kills: float32 written beside a bfloat16 model."""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(tiny_model).bfloat16().save_pretrained(tmp_path / "half")
    base = BaseModel.load(str(tmp_path / "half"), "cpu")
    assert base.model.dtype == torch.float32
    train(base, rows, replace(SETTINGS, steps=1), tmp_path / "head")
    assert {tensor.dtype for tensor in load_file(tmp_path / "head" / ExitHead.file).values()} == {torch.bfloat16}


@pytest.mark.parametrize(("num_rows", "batch_rows"), [(7, 3), (2, 5), (10, 10)])
def test_every_row_once_an_epoch(num_rows: int, batch_rows: int) -> None:
    """Kills: rows that are left out or drawn twice, and the same order in every epoch."""
    batches = list(islice(row_batches(num_rows, batch_rows, seed=0), 3 * num_rows))
    assert {len(batch) for batch in batches} == {batch_rows}
    picked = list(chain.from_iterable(batches))
    epochs = [picked[start : start + num_rows] for start in range(0, len(picked), num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_schedule() -> None:
    """Kills: a rate that starts at nothing, ends high, or leaves [0, 1]."""
    for steps in (1, 10, 1000):
        rates = [schedule(step, steps) for step in range(steps)]
        assert all(0 < rate <= 1 for rate in rates) and rates[-1] <= 1 / steps + 1e-9


def arguments(model: Path, data: list[Path], out: Path, steps: int) -> argparse.Namespace:
    return argparse.Namespace(
        model=str(model), dataset_path=data, out=out, exit_layer=1, steps=steps, batch_tokens=64, row_tokens=64,
        learning_rate=0.01, heldout=0.2, device="cpu", seed=0, command="train-exit-head",
    )  # fmt: skip


def test_full_disk(base: BaseModel, rows: list[list[int]], tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk. Kills: a traceback of torch's, and half a file left there."""
    settings, full = replace(SETTINGS, steps=1), r"^--out must be a folder on a disk with free space, not .* \(.+\)\.$"
    train(base, rows, settings, tmp_path / "old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for folder in ("old", "new"):
            with pytest.raises(ConfigError, match=full):
                train(base, rows, settings, tmp_path / folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "new").iterdir()) == []
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


def test_scores_only_what_was_not_trained_on(
    tiny_model: Path, text_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: held-out rows in the training set, and a share that is ignored."""
    seen: dict[str, Any] = {}
    original = command.train

    def spying_train(base: Any, rows: Any, *args: Any) -> Any:
        seen["trained"] = rows
        return original(base, rows, *args)

    def spying_texts(base: Any, rows: Any, *args: Any) -> Any:
        seen["scored"] = rows
        return write_texts(base, rows, *args)

    monkeypatch.setattr(command, "train", spying_train)
    monkeypatch.setattr(command, "write_texts", spying_texts)
    assert command.run(arguments(tiny_model, text_files, tmp_path, steps=1)) == 0
    trained, scored = ({tuple(row) for row in seen[name]} for name in ("trained", "scored"))
    assert not trained & scored
    assert len(scored) == round(0.2 * (len(trained) + len(scored)))


@pytest.mark.parametrize(("early_layers", "late_layer"), [(0, 1), (1, 1), (0, 3)])
def test_jump_unrolls_as_it_serves(base: BaseModel, rows: list[list[int]], early_layers: int, late_layer: int) -> None:
    """Each draft token of a place by its definition: the model over the text before the draft, the jump over the draft.
    Fails if a pass sees text that its draft replaces, or not what an earlier pass left, or stands at another place.
    """
    head = jump_head(0.1, early_layers=early_layers, late_layer=late_layer, inner_size=8)
    row = rows[0][:12]
    [states] = base.hidden_states([row])
    guesses = list(jump_guesser(base, head)(states, 3))
    assert [guess.start for guess in guesses] == [1, 2, 3] and len(guesses[2].logits) == 12 - 3
    for begin in (1, 5, 9):  # of the newest token
        late, last = states[late_layer][:begin], states[-1][begin - 1]
        for step, guess in enumerate(guesses):
            early = states[early_layers][begin + step]
            late = torch.cat((late, head.states(early, last)[None]))
            layers = base.cut(range(late_layer, 3))
            last = layers(inputs_embeds=late[None], use_cache=False).last_hidden_state[0, -1]
            torch.testing.assert_close(guess.logits[begin - 1], base.logits(last[None])[0], atol=1e-3, rtol=1e-3)


def test_exact_jump(base: BaseModel, rows: list[list[int]]) -> None:
    """What adds nothing to the exact state says what the model says. Fails if a guess is compared at another place."""
    head = jump_head(0.0, early_layers=2, late_layer=2, inner_size=1)
    found = score(base, rows[:3], jump_guesser(base, head), 3)
    assert found.match == [1, 1, 1] and min(found.overlap) > 0.999
    assert found.length == pytest.approx(4)


@pytest.mark.parametrize("late_layer", [2, 3])
def test_jump_learns(
    base: BaseModel, rows: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_layer: int
) -> None:
    """Held-out agreement rises by the fit alone, and by steps alone; with one layer behind the jump, or none. Fails if
    no step is taken, if the fit's halves change places, if it fits normed states in front of the norm, or if what is
    saved is not what was trained.
    """
    settings = replace(JUMP, steps=40, learning_rate=0.003, late_layer=late_layer)
    fitted, nothing = settings.begin(base, rows[:-8]), settings.begin(base, rows[:-8])
    nothing.mix.weight.zero_()
    before, by_fit = (overlaps(base, rows[-8:], head) for head in (nothing, fitted))
    monkeypatch.setattr(JumpSettings, "begin", lambda *_: nothing)
    by_steps = overlaps(base, rows[-8:], train(base, rows[:-8], settings, tmp_path))
    assert before + 0.3 < min(by_fit, by_steps), (before, by_fit, by_steps)
    check_jump(tmp_path, num_layers=3, hidden_size=32)
    assert overlaps(base, rows[-8:], JumpHead.load(tmp_path)) == by_steps


def test_look_ahead_unrolls_as_it_serves(base: BaseModel, rows: list[list[int]]) -> None:
    """Each draft token of a place by its definition: the exit over the text and the embeddings behind it. Fails if an
    embedding sees text that its draft replaces, or another draft's embeddings, or stands elsewhere.
    """
    torch.manual_seed(0)
    embeddings = torch.randn(2, 32)
    ahead = LookAhead(
        LookAheadConfig(exit_layer=2, hidden_size=32, num_embeddings=2), {"embeddings.weight": embeddings}
    )
    row = rows[0][:12]
    [states] = base.hidden_states([row])
    guesses = list(look_ahead_guesser(base, ahead)(states, 3))
    assert [guess.start for guess in guesses] == [0, 1, 2]
    for newest in (0, 5, 9):
        fed = torch.cat((states[0][: newest + 1], embeddings))
        exits = base.cut(range(2))(inputs_embeds=fed[None], use_cache=False).last_hidden_state[0, newest:]
        found = torch.stack([guess.logits[newest] for guess in guesses])
        torch.testing.assert_close(found, base.logits(exits), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("with_head", [False, True])
def test_look_ahead_learns(base: BaseModel, rows: list[list[int]], tmp_path: Path, with_head: bool) -> None:
    """Held-out agreement of the second token rises, that of the first stays. Fails if the head is left out."""
    head = None
    if with_head:
        initial_head(base, 2).save(tmp_path / "head")
        head = str(tmp_path / "head")
    settings = LookAheadSettings(**{**COMMON, "steps": 30}, exit_layer=2, exit_head=head, num_draft=2)
    parts = settings.begin(base, rows[:-8]), train(base, rows[:-8], settings, tmp_path)
    before, after = (score(base, rows[-8:], settings.guesser(base, part), 2) for part in parts)
    check_look_ahead(tmp_path, exit_layer=2, hidden_size=32, num_draft=2)
    assert after.match[0] == before.match[0] and after.overlap[1] > 2 * before.overlap[1], (before, after)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("train-exit-head", {"exit_layer": 1, "layers": None}),
        ("train-exit-head", {"exit_layer": None, "layers": [0, 2]}),
        ("train-jump", {"early_layers": 0, "late_layer": None, "inner_size": 4, "num_draft": 2}),
        ("train-look-ahead", {"exit_layer": 1, "exit_head": None, "num_draft": 3}),
    ],
)
def test_commands(
    tiny_model: Path, text_files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, own: Any
) -> None:
    """Each command ends with tables and a configuration that our methods take. Fails if one of its arguments does not
    reach the part."""
    args = arguments(tiny_model, text_files, tmp_path, steps=2)
    del args.exit_layer
    assert command.run(argparse.Namespace(**{**vars(args), "command": name, **own})) == 0
    said = capsys.readouterr().out
    config = json.loads(shlex.split(said.rpartition("--speculative-config ")[2])[0])
    assert parse_config(config).common.num_speculative_tokens == own.get("num_draft", 3) or name == "train-jump"
    assert (
        "draft tokens that are correct if all earlier ones are" in said
        and "T 1, coupled" in said
        and "T 1, trained " in said
    )
    assert all(len(line) <= 100 for line in said.splitlines() if not line.startswith(("--", "Saved")))


def test_verdict() -> None:
    """Fails if a part that will not pay off is recommended without a warning."""
    cases = (
        (1.5, 1.4, "did not improve"),
        (1.0, 1.09, "too few to pay off"),
        (1.0, 1.3, "hardly pays off"),
        (1.0, 2.0, "may pay off"),
    )
    for before, after, words in cases:
        scores = [Scores([0.1], [0.1], length, {"greedy": length}) for length in (before, after)]
        assert words in Trained(*scores, {"method": "jump"}, 10).verdict


def half_right(base: BaseModel, wrong: int) -> Guesser:
    """Guesses wrongly at one place of a draft, and as the model does at the others."""

    def guesses(states: Any, num_draft: int) -> Any:
        full = base.logits(states[-1])
        for place in range(num_draft):
            yield Guess(-full[place:] if place == wrong else full[place:], place)

    return guesses


def test_walk() -> None:
    """Against many engines that draw what they accept. Fails if a step begins where none does, or if an accepted draft
    brings no token of the model's own."""
    rng = torch.Generator().manual_seed(0)
    chances = torch.rand(3, 40, generator=rng)
    tokens = steps = 0
    for _ in range(3000):
        place = 0
        while place < 40:
            accepted = int((torch.rand(3, generator=rng) < chances[:, place]).int().cumprod(0).sum())
            tokens, steps, place = tokens + accepted + 1, steps + 1, place + accepted + 1
    expected = walk(chances)
    assert expected[1] == pytest.approx(steps / 3000, rel=0.01) and expected[0] == pytest.approx(
        tokens / 3000, rel=0.01
    )


def test_write_texts(base: BaseModel, rows: list[list[int]]) -> None:
    """What the model says, drawn with noise that a draft can know: one with the model's own logits is always accepted,
    however it is drawn. Fails if a text's noise is another seed's or another place's, or if the cache is not."""
    cold, warm = (write_texts(base, rows[:3], heat) for heat in (0.0, 1.0))
    for text in cold:
        [states] = base.hidden_states([text.row])
        said = base.logits(states[-1]).argmax(-1).tolist()
        assert text.begin == 16 and text.row[16:] == said[15:-1]
    assert [text.row[:16] for text in cold] == [text.row[:16] for text in warm] == [row[:16] for row in rows[:3]]
    assert warm[0].row != warm[1].row != cold[1].row
    found = scores(base, cold, warm, half_right(base, 3), 3)
    assert [found.length, *found.sampled_lengths.values()] == pytest.approx(
        [4.0, found.sampled_lengths["greedy"], 4, 4]
    )
    assert found.sampled_lengths["greedy"] < 4


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_draft_ends_at_its_first_wrong_token(base: BaseModel, rows: list[list[int]], wrong: int) -> None:
    """Fails if what stands behind a wrong token counts."""
    found = score(base, rows[:2], half_right(base, wrong), 3)
    assert found.length == pytest.approx(1 + wrong)
    assert found.match == [float(place != wrong) for place in range(3)]


def test_resumes_from_another_part(base: BaseModel, rows: list[list[int]], tmp_path: Path) -> None:
    """As from one that learned while it served. Kills: weights that begin anew; a part of another shape."""
    trained = train(base, rows, replace(JUMP, steps=2), tmp_path / "first")
    settings = replace(JUMP, steps=2, resume=str(tmp_path / "first"))
    assert same_weights(settings.begin(base, rows), trained) and not same_weights(JUMP.begin(base, rows), trained)
    with pytest.raises(ConfigError, match=r"^jump: head must be a head whose inner_size is 17, not 16 "):
        replace(settings, inner_size=17).begin(base, rows)


def same_weights(part: Any, other: Any) -> bool:
    return all(map(torch.equal, part.parameters(), other.parameters()))
