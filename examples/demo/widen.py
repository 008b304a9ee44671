"""Function-preserving widening: a Llama that costs more and computes the same logits.

The hidden state is padded with zeros, so every weight that only reads the padding, or has a result that nothing
reads, is free: those keep small random values. Each layer may be followed by layers that add nothing. Speed
measured on the result is that of a model of its size, with the acceptance rates of the small model. After
widening with depth factor d, the output of layer n appears after layers n * d - d + 1 to n * d.

    python examples/demo/widen.py examples/demo/model OUT --hidden-factor 4 --intermediate 7168

H: hidden size, I: MLP width, A: width of all attention heads together.
"""

import argparse
import math
import shutil
import sys
from pathlib import Path

import prompts
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
from widen_parts import widen_part

TOLERANCE = 1e-4
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def widened_config(config: LlamaConfig, hidden_factor: int, intermediate: int, depth_factor: int) -> LlamaConfig:
    """The configuration of the wide model; ValueError where the arguments or the model do not allow it."""
    if hidden_factor < 1 or 4 ** round(math.log(hidden_factor, 4)) != hidden_factor:
        raise ValueError(
            f"--hidden-factor is {hidden_factor}; allowed: powers of 4 (1, 4, 16, ...), which scale exactly"
        )
    if intermediate < config.intermediate_size:
        raise ValueError(
            f"--intermediate is {intermediate}; allowed: {config.intermediate_size} or more, as in the model"
        )
    if depth_factor < 1:
        raise ValueError(f"--depth-factor is {depth_factor}; allowed: 1 or more")
    if config.attention_bias or config.mlp_bias:
        raise ValueError("the model has biases; allowed: a Llama without attention_bias and mlp_bias")
    changes = {
        "hidden_size": config.hidden_size * hidden_factor,
        "intermediate_size": intermediate,
        "num_hidden_layers": config.num_hidden_layers * depth_factor,
        "num_attention_heads": config.num_attention_heads * hidden_factor,
        "num_key_value_heads": config.num_key_value_heads * hidden_factor,
        "head_dim": config.head_dim,
        # The mean square over padded states is smaller by the factor, and so must eps be.
        "rms_norm_eps": config.rms_norm_eps / hidden_factor,
    }
    return LlamaConfig.from_dict(config.to_dict() | changes)


@torch.no_grad()
def fill(wide: nn.Module, small: nn.Module, others_zero: bool) -> None:
    """Copies a small weight into the low corner of a wide one; the rest becomes zero, or keeps its values."""
    if others_zero:
        wide.weight.zero_()
    wide.weight[tuple(slice(size) for size in small.weight.shape)] = small.weight


@torch.no_grad()
def widen(small: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """A model of `config` with the logits of `small`."""
    wide = LlamaForCausalLM(config)
    depth_factor = config.num_hidden_layers // small.config.num_hidden_layers
    norm_scale = math.sqrt(small.config.hidden_size / config.hidden_size)
    # [V, H]: padding of the hidden state starts as zero, and nothing below writes to it.
    fill(wide.model.embed_tokens, small.model.embed_tokens, others_zero=True)
    if not config.tie_word_embeddings:
        fill(wide.lm_head, small.lm_head, others_zero=False)
    norms = [(wide.model.norm, small.model.norm)]
    for index, layer in enumerate(wide.model.layers):
        if index % depth_factor:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            continue
        source = small.model.layers[index // depth_factor]
        norms.append((layer.input_layernorm, source.input_layernorm))
        norms.append((layer.post_attention_layernorm, source.post_attention_layernorm))
        # [A, H] and [I, H]: the added heads and MLP units compute something, which nothing reads.
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            fill(layer.get_submodule(name), source.get_submodule(name), others_zero=False)
        # [H, A] and [H, I]
        fill(layer.self_attn.o_proj, source.self_attn.o_proj, others_zero=True)
        fill(layer.mlp.down_proj, source.mlp.down_proj, others_zero=True)
    for wide_norm, small_norm in norms:
        wide_norm.weight[: small.config.hidden_size] = small_norm.weight * norm_scale
    return wide


@torch.inference_mode()
def check(small_path: Path, wide_path: Path) -> tuple[float, bool, int]:
    """(largest difference of logits in float32, whether every argmax agrees, number of held-out tokens)."""
    tokenizer = AutoTokenizer.from_pretrained(wide_path)
    small = AutoModelForCausalLM.from_pretrained(small_path, dtype=torch.float32)
    wide = AutoModelForCausalLM.from_pretrained(wide_path, dtype=torch.float32)
    largest, same, num_tokens = 0.0, True, 0
    for prompt in prompts.load_prompts("continue", 8):
        token_ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        # [1, T, V]
        small_logits, wide_logits = small(token_ids).logits, wide(token_ids).logits
        largest = max(largest, (small_logits - wide_logits).abs().max().item())
        same &= torch.equal(small_logits.argmax(-1), wide_logits.argmax(-1))
        num_tokens += token_ids.shape[1]
    return largest, same, num_tokens


def check_same(small_path: Path, wide_path: Path) -> None:
    """Says how far the logits are apart; ValueError if that is too far."""
    largest, same, num_tokens = check(small_path, wide_path)
    argmax = "identical" if same else "DIFFERENT"
    print(f"max |difference| of logits: {largest:g} over {num_tokens} tokens; argmax {argmax}")
    if largest > TOLERANCE or not same:
        raise ValueError(f"logits differ by {largest:g}; allowed: at most {TOLERANCE:g}, and identical argmax")


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, target / name)


def run(args: argparse.Namespace) -> None:
    if not (args.model / "config.json").is_file():
        raise ValueError(f"MODEL is {args.model}; allowed: a folder with a config.json")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ValueError(f"OUT is {args.out}, which exists; allowed: a new or empty folder")
    config = LlamaConfig.from_pretrained(args.model)
    if config.architectures != ["LlamaForCausalLM"]:
        raise ValueError(f"MODEL is a {config.architectures}; allowed: LlamaForCausalLM")
    wide_config = widened_config(config, args.hidden_factor, args.intermediate, args.depth_factor)
    torch.manual_seed(0)
    with torch.device(args.device):
        wide = widen(LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32), wide_config)
    wide.to(getattr(torch, args.dtype)).save_pretrained(args.out)
    copy_tokenizer(args.model, args.out)
    for part in args.parts:
        widen_part(part, args.out / part.resolve().name, args.hidden_factor, args.depth_factor)
    print(f"{args.out}: {wide.num_parameters():,} parameters, {args.dtype}")
    if not args.unchecked:
        check_same(args.model, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of a Llama checkpoint")
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder for the wide checkpoint")
    parser.add_argument("--hidden-factor", type=int, default=4, help="power of 4 (default: 4)")
    parser.add_argument("--intermediate", type=int, default=7168, help="MLP width (default: 7168)")
    parser.add_argument("--depth-factor", type=int, default=1, help="layers per layer (default: 1)")
    parser.add_argument(
        "--parts", type=Path, nargs="+", default=[], metavar="DIR",
        help="trained parts for MODEL (widen_parts.py), each widened into a folder of its name in OUT",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu", help="where the weights are made (default: cpu)")
    parser.add_argument("--unchecked", action="store_true", help="leave out the comparison of logits, on the CPU")
    logging.disable_progress_bar()
    try:
        run(parser.parse_args())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
