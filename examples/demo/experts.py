"""Function-preserving mixture of experts: a Mixtral that computes the logits of a dense Llama.

Each expert of a layer is a copy of the layer's MLP, and a router with random weights chooses some for each token: their
weights add up to 1. Every expert that some token of a step chooses is read, so that verifying more tokens reads more
of the model, as in any mixture; what drafts are worth is that of the dense model.

    python examples/demo/widen.py examples/demo/model WIDE --intermediate 1024
    python examples/demo/experts.py WIDE OUT --experts 16 --chosen 2
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils import logging
from widen import check_same, copy_tokenizer

SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def mixture_config(config: LlamaConfig, num_experts: int, num_chosen: int) -> MixtralConfig:
    """The configuration of the mixture; ValueError where the numbers make none."""
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(f"--chosen is {num_chosen}; allowed: 1 to --experts, which is {num_experts}")
    shared = {name: getattr(config, name) for name in SHARED}
    return MixtralConfig(**shared, num_local_experts=num_experts, num_experts_per_tok=num_chosen)


@torch.no_grad()
def mixed(dense: LlamaForCausalLM, config: MixtralConfig) -> MixtralForCausalLM:
    """A mixture with the logits of `dense`."""
    mixture = MixtralForCausalLM(config)
    missing = mixture.load_state_dict(dense.state_dict(), strict=False).missing_keys
    assert all(".mlp." in name for name in missing), missing
    for layer, source in zip(mixture.model.layers, dense.model.layers, strict=True):
        # [experts, 2 I, H] and [experts, H, I]
        layer.mlp.experts.gate_up_proj.copy_(torch.cat((source.mlp.gate_proj.weight, source.mlp.up_proj.weight)))
        layer.mlp.experts.down_proj.copy_(source.mlp.down_proj.weight)
        layer.mlp.gate.weight.normal_()
    return mixture


def run(args: argparse.Namespace) -> None:
    config = LlamaConfig.from_pretrained(args.model)
    torch.manual_seed(0)
    dense = LlamaForCausalLM.from_pretrained(args.model)
    mixture = mixed(dense, mixture_config(config, args.experts, args.chosen)).to(dense.dtype)
    mixture.save_pretrained(args.out)
    copy_tokenizer(args.model, args.out)
    print(f"{args.out}: {mixture.num_parameters():,} parameters")
    check_same(args.model, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of a Llama checkpoint")
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder for the mixture")
    parser.add_argument("--experts", type=int, default=16, help="of a layer (default: 16)")
    parser.add_argument("--chosen", type=int, default=2, help="for each token (default: 2)")
    logging.disable_progress_bar()
    try:
        run(parser.parse_args())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
