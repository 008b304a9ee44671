"""Trains the demo model: a small Llama with early layers that predict well, for speculative decoding.

Each step adds to the usual loss that of one exit layer, in rotation, read through the shared final norm
and head (LayerSkip, Elhoushi et al. 2024, https://arxiv.org/abs/2404.16710), and skips deeper layers at
random. An exit learns from the labels first and from the full model's distribution later. The text is
the standard library of the running interpreter, plus copy-and-rename tasks made from it (see prompts.py).

    python examples/demo/train.py --minutes 55

`--plain` leaves both out: an ordinary model, without training of early layers to predict.

Under glibc, page faults can cost as much as the arithmetic; this keeps freed memory in the process:
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_MMAP_THRESHOLD_=8589934592.
B: rows, T: tokens per row, H: hidden size, V: vocabulary.
"""

import argparse
import copy
import json
import os
import platform
import random
import tempfile
import time
from pathlib import Path

import evaluate
import prompts
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LIBRARIES = (torch, transformers, tokenizers)
STEP_TOKENS = 4096
EXIT_ROTATION = (1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2, 7)
EXIT_WEIGHT = 1.0
MAX_LAYER_DROPOUT = 0.1
EDIT_SHARE = 0.5  # of the rows
WARMUP = 0.02
LEARNING_RATE = 4e-3
GOLDEN_RATIO = 0.6180339887498949
MAX_STEP_SECONDS = 15.0

# Words keep a leading space and their underscores; digits stand alone; new lines and indentation are runs.
SPLIT = r" ?_*[A-Za-z]+_*|[0-9]| ?[^\sA-Za-z0-9_]+| ?_+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"

# The messages as they are, one after the other: the model knows no roles, but an edit task is a message that it knows.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message['content'] }}
    {{- '' if message['content'].endswith('\\n') else '\\n' }}
{%- endfor %}"""


def train_tokenizer(texts: list[str], vocab_size: int = 3072) -> PreTrainedTokenizerFast:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<bos>", "<eos>", "<pad>"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        clean_up_tokenization_spaces=False, model_max_length=8192, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


class Rows:
    """Deals training rows: stretches of a stream of shuffled files, after whole edit tasks in some rows."""

    def __init__(self, files: list[list[int]], edits: list[list[int]], rng: random.Random) -> None:
        rng.shuffle(files)
        self.stream = torch.tensor([token for ids in files for token in ids], dtype=torch.int16)
        self.edits, self.bos, self.cursor = edits, files[0][0], 0

    def take(self, length: int, rng: random.Random) -> Tensor:
        """A row of `length` tokens that starts with <bos>."""
        row: list[int] = []
        if rng.random() < EDIT_SHARE:
            for ids in rng.sample(self.edits, length // 80):
                if len(row) + len(ids) <= length:
                    row += ids
        if len(row) < length:
            num_left = length - len(row) - 1
            # Golden-ratio steps cover the stream evenly, and take neighbouring rows from unrelated files.
            start = int(self.cursor * GOLDEN_RATIO % 1 * (len(self.stream) - num_left))
            row += [self.bos, *self.stream[start : start + num_left].tolist()]
            self.cursor += 1
        return torch.tensor(row)

    def batch(self, progress: float, rng: random.Random) -> Tensor:
        """[B, T + 1] int64, B * T = STEP_TOKENS; the longest rows come late, for contexts of 1-2k tokens."""
        length = rng.choices((512, 1024, 2048), (7, 3, 0) if progress < 0.6 else (6, 3, 1))[0]
        return torch.stack([self.take(length + 1, rng) for _ in range(STEP_TOKENS // length)])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x_float = x.float()
    return (x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@torch.compile(dynamic=False)
def block(x: Tensor, cos: Tensor, sin: Tensor, norms: list[Tensor], weights: list[Tensor]) -> Tensor:
    """One Llama layer on x [B, T, H] bfloat16 (master weights in float32), equal to transformers'."""
    wq, wk, wv, wo, w_gate, w_up, w_down = (weight.to(x.dtype) for weight in weights)
    h = rms_norm(x, norms[0])
    # [B, heads, T, 64]
    q, k, v = (F.linear(h, w).unflatten(-1, (-1, 64)).transpose(1, 2) for w in (wq, wk, wv))
    groups = q.shape[1] // k.shape[1]
    k, v = (rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    attention = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
    x = x + F.linear(attention.transpose(1, 2).flatten(2), wo)
    h = rms_norm(x, norms[1])
    return x + F.linear(F.silu(F.linear(h, w_gate)) * F.linear(h, w_up), w_down)


@torch.compile(dynamic=False)
def plain_loss(final: Tensor, norm: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Loss of the full model."""
    logits = F.linear(rms_norm(final, norm), head.to(final.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@torch.compile(dynamic=False)
def losses(final: Tensor, early: Tensor, norm: Tensor, head: Tensor, labels: Tensor, mix: Tensor) -> tuple:
    """(loss of the full model, loss of the exit); mix moves the exit's target from labels to full model."""
    head = head.to(final.dtype)
    # [B, T, V] float32
    logprobs = F.linear(rms_norm(final, norm), head).float().log_softmax(-1)
    early_logprobs = F.linear(rms_norm(early, norm), head).float().log_softmax(-1)
    label_loss = -logprobs.gather(-1, labels[..., None]).mean()
    early_label_loss = -early_logprobs.gather(-1, labels[..., None]).mean()
    teacher_loss = -(logprobs.detach().exp() * early_logprobs).sum(-1).mean()
    return label_loss, (1 - mix) * early_label_loss + mix * teacher_loss


class Trainer:
    """The model in float32, its optimizers (Muon for matrices, AdamW for the rest) and the counts."""

    def __init__(self, model: LlamaForCausalLM, minutes: float, max_steps: int, seed: int, plain: bool) -> None:
        self.model, self.seconds, self.max_steps = model, 60 * minutes, max_steps
        self.seed, self.plain = seed, plain
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        muon = torch.optim.Muon(matrices, lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.optimizers = (muon, adam)
        self.num_steps, self.elapsed = 0, 0.0
        self.layers = []  # norms and matrices, in the order of their modules
        for layer in model.model.layers:
            linears = [module.weight for module in layer.modules() if isinstance(module, torch.nn.Linear)]
            self.layers.append(([layer.input_layernorm.weight, layer.post_attention_layernorm.weight], linears))

    @property
    def progress(self) -> float:
        """0 to 1: by steps, or by time where time runs out first."""
        return min(1.0, max(self.num_steps / self.max_steps, self.elapsed / self.seconds))

    def step(self, rows: Rows) -> dict[str, float]:
        start = time.perf_counter()
        progress, rng = self.progress, random.Random(f"{self.seed}/{self.num_steps}")
        scale = min(1.0, progress / WARMUP + 0.02) * (1 - progress)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * scale
        exit_layer = EXIT_ROTATION[self.num_steps % len(EXIT_ROTATION)]
        batch = rows.batch(progress, rng)
        x = self.model.model.embed_tokens(batch[:, :-1]).bfloat16()
        cos, sin = self.model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        for index, (norms, weights) in enumerate(self.layers):
            # LayerSkip equation 1: 0 at the first layer, MAX_LAYER_DROPOUT at the last.
            if self.plain or rng.random() >= MAX_LAYER_DROPOUT * (2 ** (index / (len(self.layers) - 1)) - 1):
                x = block(x, cos, sin, norms, weights)
            if index + 1 == exit_layer:
                early = x
        norm, head, labels = self.model.model.norm.weight, self.model.lm_head.weight, batch[:, 1:].contiguous()
        exit_losses = {}
        if self.plain:
            loss = whole_loss = plain_loss(x, norm, head, labels)
        else:
            loss, exit_loss = losses(x, early, norm, head, labels, torch.tensor(progress))
            whole_loss = loss + EXIT_WEIGHT * exit_loss
            exit_losses[f"exit{exit_layer}"] = exit_loss.item()
        whole_loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.num_steps += 1
        # A step that compiled, or was suspended, does not use up the time box.
        self.elapsed += min(time.perf_counter() - start, MAX_STEP_SECONDS)
        return {"loss": loss.item(), **exit_losses, "minutes": self.elapsed / 60}

    def state(self, rows: Rows) -> dict:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        weights = {"model": self.model.state_dict(), "optimizers": optimizers}
        counts = {"num_steps": self.num_steps, "elapsed": self.elapsed, "cursor": rows.cursor}
        return {"seed": self.seed, "plain": self.plain, **weights, **counts}

    def load(self, state: dict, rows: Rows) -> None:
        for name in ("seed", "plain"):
            if state[name] != getattr(self, name):
                raise SystemExit(f"error: --{name} is {getattr(self, name)}, but the run in --state has {state[name]}")
        self.model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        self.num_steps, self.elapsed, rows.cursor = state["num_steps"], state["elapsed"], state["cursor"]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, facts: dict) -> None:
    """Writes the checkpoint in bfloat16, and each of `facts` as a JSON file; no file is seen half written."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        copy.deepcopy(model).bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for name, fact in facts.items():
            (Path(folder) / name).write_text(json.dumps(fact, indent=1) + "\n")
        (Path(folder) / "README.md").write_text(evaluate.model_card(facts["training.json"]))
        for path in Path(folder).iterdir():
            os.replace(path, out / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: the folder of the demo model; with --plain it must be given")
    parser.add_argument("--plain", action="store_true", help="no exits, no layers skipped")
    parser.add_argument("--minutes", type=float, default=55.0, help="time box of the training steps")
    parser.add_argument("--steps", type=int, default=100_000, help="stop here at the latest; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    path = Path(tempfile.gettempdir()) / "specplugins_demo_train.pt"
    parser.add_argument("--state", type=Path, default=path, help="resume from here where it exists")
    args = parser.parse_args()
    if args.minutes <= 0 or args.steps < 1:
        parser.error(f"--minutes is {args.minutes}, --steps is {args.steps}; allowed: more than 0, 1 or more")
    if args.out is None and args.plain:
        parser.error("--out is missing; with --plain it must be given")
    out = args.out or prompts.HERE / "model"

    files = list(prompts.library_files())
    train_files = [file for file in files if not prompts.is_held_out(file[0])]
    rng, texts = random.Random(args.seed), [text for _, text in train_files]
    tokenizer = train_tokenizer(texts)
    tasks = [prompt + answer for prompt, answer in evaluate.edit_tasks(train_files, 20_000, 3, rng)]
    edits = evaluate.encode(tokenizer, tasks)
    rows = Rows(evaluate.encode(tokenizer, texts), [ids for ids in edits if len(ids) <= 2048], rng)

    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), args.minutes, args.steps, args.seed, args.plain)
    if args.state.exists():
        trainer.load(torch.load(args.state), rows)
    print(f"{trainer.model.num_parameters():,} parameters, {len(rows.stream):,} training tokens")

    saved = trainer.elapsed
    look = "{l_bar}{bar}| {elapsed} {postfix}"
    with tqdm(total=100.0, initial=100 * trainer.progress, unit="%", bar_format=look) as bar:
        while trainer.progress < 1:
            bar.set_postfix(step=trainer.num_steps, **trainer.step(rows))
            bar.update(100 * trainer.progress - bar.n)
            if trainer.elapsed - saved > 240:
                saved = trainer.elapsed
                torch.save(trainer.state(rows), args.state)

    facts: dict = {"heldout_files.json": [source for source, _ in files if prompts.is_held_out(source)]}
    facts["training.json"] = {
        "seed": args.seed,
        "steps": trainer.num_steps,
        "tokens_seen": trainer.num_steps * STEP_TOKENS,
        "training_minutes": round(trainer.elapsed / 60, 1),
        "plain": args.plain,
        "parameters": trainer.model.num_parameters(),
        "versions": {"python": platform.python_version(), **{m.__name__: m.__version__ for m in LIBRARIES}},
        "heldout": evaluate.scores(trainer.model, tokenizer),
    }
    save(trainer.model, tokenizer, out, facts)
    args.state.unlink(missing_ok=True)
    print(json.dumps(facts["training.json"], indent=1))


if __name__ == "__main__":
    main()
