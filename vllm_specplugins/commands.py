"""Commands of `vllm-specplugins`: their arguments, help texts and modules. Heavy imports happen only when a command
runs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_specplugins.arguments import Add, count, dictionary, layer, listed, positive, share, temperature, whole

TORCH = ("torch", "transformers", "rich")
DATA = (
    'JSON lines with "prompt" and "output" (text or token ids), with "messages" and their answers (there or in '
    '"choices"), or with "text"; or plain UTF-8 text; - reads standard input'
)


def _train_exit_head(add: Add) -> None:
    """Train a norm and a head for some layers, so that they draft more like the whole model.

    Example: %(prog)s MODEL --exit-layer 8 --dataset-path corpus/*.txt --out HEAD
    """
    add("--exit-layer", "number of the model's first layers that run before the head", layer)
    add(
        "--layers",
        "indices of the layers that run before the head, for example 0,1,4, in place of --exit-layer",
        listed(whole(0, 9_999)),
    )
    _training(add)


def _train_jump(add: Add) -> None:
    """Train a jump, which predicts the final hidden state, so that drafting runs no layers.

    Example: %(prog)s MODEL --dataset-path corpus/*.txt --out HEAD
    """
    add("--early-layers", "number of layers that run for each token before the jump", whole(0, 10_000), 0)
    shown = "the model's number of layers: none runs after the jump"
    add("--late-layer", "index of the first layer that runs after the jump", whole(0, 10_000), shown=shown)
    add("--inner-size", "width of the jump's inner layer", whole(1, 1_000_000), shown="4 times the hidden size")
    add("--num-draft", "number of consecutive draft tokens to train for", whole(1, 64), 3)
    add(
        "--resume",
        "folder of a trained jump from which training continues, for example one that an engine trained",
        shown="none",
        metavar="DIR",
    )
    _training(add)


def _train_look_ahead(add: Add) -> None:
    """Train look-ahead embeddings, with which an early exit drafts all tokens in one pass.

    Example: %(prog)s MODEL --exit-layer 8 --dataset-path c/*.txt --out AHEAD
    """
    add("--exit-layer", "number of the model's first layers that process the embeddings", layer, required=True)
    add("--exit-head", "a trained head for this layer", shown="the model's norm and head", metavar="DIR")
    add("--num-draft", "number of tokens that one pass drafts", whole(2, 64), 4)
    _training(add)


def _training(add: Add) -> None:
    _model(add)
    add("--dataset-path", DATA, Path, nargs="+", required=True)
    add("--out", "new folder for the trained part", Path, required=True)
    add("--steps", "number of optimizer steps", count, 1000)
    add("--batch-tokens", "number of tokens per optimizer step", whole(16, 10_000_000), 4096)
    add("--row-tokens", "number of tokens per row", whole(16, 1_000_000), 512)
    add("--learning-rate", "highest learning rate", share, 1e-3)
    add("--heldout", "share of rows to hold out for the score", share, 0.05)
    add("--device", "device to train on", shown="cuda if there is a GPU", choices=("cpu", "cuda"))
    add("--seed", "seed for the order of the rows", whole(0, 2**31), 0)


def _calibrate(add: Add) -> None:
    """Find the method, exit layer and number of draft tokens that serve a model fastest or, with --layers, the layers
    that draft best.

    Example: %(prog)s MODEL --dataset-path corpus/*.txt --output-json REPORT
    """
    _model(add)
    add("--dataset-path", DATA, Path, nargs="+", required=True)
    add("--exit-layers", "exit layers to measure, for example 1,2,4", listed(layer), shown="all but the last")
    words = "search the best layers for each number of layers, as in 16,24; continues a search in --output-json"
    add("--layers", words, listed(layer))
    add("--exits", "number of the best exits that an engine serves and measures", whole(1, 64), 2)
    also, words = (
        "prompt_lookup,suffix_lookup,cascade",
        "other methods to serve and measure, as for `bench --methods`, or none",
    )
    add("--also", words, default=[also], shown=also, nargs="+", metavar="METHOD")
    add("--max-draft", "longest draft of an exit, in tokens", whole(1, 64), 8, metavar="K")
    add("--enforce-eager", "serve without CUDA graphs; use it if your server does", bool)
    _measuring(add, rounds=3, prompts=8, tokens=96)


def _verify_lossless(add: Add) -> None:
    """Compare outputs that are sampled with and without speculation with the exact distribution.

    Example: %(prog)s --method prompt_lookup early_exit
    """
    add(
        "--method",
        "names of methods, or values of --speculative-config",
        shown="all methods",
        nargs="+",
        metavar="METHOD",
    )
    add("--samples", "number of samples per test", whole(100, 10_000_000), 4000)
    add("--seed", "seed of the model, the prompts and the engines", whole(0, 2**31), 0)
    add("--output-json", "file for the report", Path)


def _check(add: Add) -> None:
    """Run your proposer against a recorded engine, and report rule violations, gain and cost.

    Example: %(prog)s my_pkg.module:MyProposer. The exit code
    is 0 without violations, 1 with violations, and 2 if the proposer cannot run.
    """
    add("proposer", "package.module:Class, or the name of a registered method", metavar="PROPOSER")
    add("--options", "options of the proposer", dictionary, {}, metavar="JSON")
    add("--time-budget-ms", "time limit per step", whole(1, 60_000), 1000)
    add("--tokenizer", "model with the tokenizer for the class, for example examples/demo/model", metavar="MODEL")


def _doctor(add: Add) -> None:
    """Check an installation, a configuration and a model without starting an engine.

    Example: %(prog)s --speculative-config '{"method":"prompt_lookup"}'. The exit code is
    0 if vLLM would serve the configuration, 1 if not, and 2 if the arguments are wrong.
    """
    shown = '{"method":"prompt_lookup"}'
    add("--speculative-config", "configuration to check", dictionary, shown=shown, metavar="JSON")
    _model(add, "--model")
    words = "flags of `vllm serve` (-- --enable-lora), or the whole command line (-- vllm serve MODEL FLAGS)"
    add("serve", words, nargs="*", metavar="ARGUMENT")
    add("--json", "print the findings as JSON", bool)


def _collect(add: Add) -> None:
    """Pack metrics, versions, a diagnosis and log lines of a running server, without prompts and answers.

    Example: %(prog)s --url http://localhost:8000 --log vllm.log --out incident.zip -- vllm serve MODEL FLAGS.
    Without the server's command line or --speculative-config, the diagnosis covers only the installation.
    """
    add("--url", "address of the server", default="http://localhost:8000")
    add("--log", "log file of the server; the bundle gets its warnings and lines about speculation", Path, shown="none")
    add("--speculative-config", "the server's --speculative-config", dictionary, shown="none", metavar="JSON")
    add("--out", "new file for the bundle", Path, required=True)
    add("serve", "the server's command line, as in -- vllm serve MODEL FLAGS", nargs="*", metavar="ARGUMENT")


def _build_store(add: Add) -> None:
    """Make a store for suffix_lookup from past outputs.

    Example: %(prog)s --tokenizer MODEL --dataset-path logs/*.jsonl --out store.bin
    """
    _model(add, "--tokenizer", required=True)
    add("--dataset-path", f"{DATA}; a full store keeps the later texts", Path, nargs="+", required=True)
    add("--out", "file for the store, which the field store_path names", Path, required=True)
    add(
        "--cache-salt",
        "the `cache_salt` of the requests that may use the store",
        shown="requests without a salt",
        metavar="SALT",
    )


def _bench(add: Add) -> None:
    """Measure the speed-up of methods for a model on this machine, with engines that take turns.

    Example: %(prog)s --model MODEL --methods ngram,prompt_lookup --workloads edit,chat
    --max-concurrency 1,4
    """
    _model(add, "--model", " (default: the chat model that examples/chat_model.py makes)")
    methods = "ngram,prompt_lookup,cascade; the last one only without --trace"
    words = "names of methods, names with K (ngram:31), or values of --speculative-config"
    add("--methods", words, shown=methods, nargs="+", metavar="METHOD")
    names = "workloads: edit, summary, maths, chat, retrieval, translation, extraction, agent"
    add("--workloads", names, listed(str.strip), shown="the first four, if --dataset-path is not given")
    add("--dataset-path", DATA, Path, [], "none", nargs="+")
    add("--max-concurrency", "numbers of concurrent requests, for example 1,4", listed(whole(1, 4096)), [1], "1")
    add("--temperature", "temperatures, for example 0,0.8", listed(temperature), [0.0], "0")
    add("--ignore-eos", "ignore end tokens, so that each output has the maximum length", bool)
    add("--engine-args", "additional arguments of vllm.LLM for all engines", dictionary, {}, metavar="JSON")
    add("--trace", "log of token ids: every engine emits its outputs; replaces --workloads", Path, metavar="LOG")
    words = "with --trace: also send requests at random times, at shares of the rate without speculation, as in 0.5,0.9"
    add("--rate", words, listed(positive), [], "none")
    words = 'with --trace: drafter of vLLM; the log has its accepted lengths under this name in "accepted"'
    add("--drafter", words, metavar="NAME")
    words = '"dummy" uses random weights, so a folder with a config.json suffices'
    add("--load-format", words, choices=("auto", "dummy"))
    _measuring(add, rounds=5, prompts=4, tokens=None)


def _replay(add: Add) -> None:
    """Run recorded traffic through every proposer that reads only token ids, without a model or a GPU, and recommend a
    method from accepted tokens and costs.

    Example: %(prog)s --dataset-path trace.jsonl --tokenizer MODEL --max-concurrency 1,32
    """
    add("--dataset-path", DATA, Path, nargs="+", required=True)
    _model(add, "--tokenizer", "; required if the data is text")
    words = "names of methods, names with K (prompt_lookup:5), or values of --speculative-config"
    add("--methods", words, default=[], shown="all methods that read only token ids", nargs="+", metavar="METHOD")
    ladder = "3,5,8,12,15,24,31,48,64, while the speed rises"
    add("--num-draft", "values of K to try", listed(whole(1, 64)), shown=ladder)
    add("--max-concurrency", "numbers of concurrent requests, for example 1,32", listed(whole(1, 4096)), [1], "1")
    add("--requests", "number of requests to read", count, 2000)
    add("--by-file", "report each file of --dataset-path separately", bool)
    words = "read only requests with even or odd ids; the line number replaces a missing id"
    add("--ids", words, default="all", choices=("all", "even", "odd"))
    add("--max-output", "longest output of a request, in tokens; longer ones are skipped", count)
    words = "also replay a drafter: its name in the log, its time per draft in ms, and K, as in eagle3:2.14:5"
    add("--drafter", words, metavar="NAME:MS[:MS_A_TOKEN]:K")
    published = "llama-2-7b or llama-3.1-8b on an H100"
    words = f"step times: {published}, MS:MS_A_TOKEN, or a file from `bench`"
    add("--costs", words, default="llama-2-7b", metavar="COSTS")
    words = "model runner that chooses draft lengths; GPUs run v2"
    add("--runner", words, default="v2", choices=("v1", "v2"))
    add("--draft-us", "drafting time per request and step, in us", positive, shown="measured on this machine")
    add("--output-json", "file for the figures", Path)


def _measuring(add: Add, rounds: int, prompts: int, tokens: int | None) -> None:
    add("--rounds", "measured rounds, after one warm-up", whole(1, 1000), rounds)
    add("--num-prompts", "number of prompts per round, at least the number of concurrent requests", layer, prompts)
    words = "length of prompts that are cut from texts, in tokens"
    add("--prompt-tokens", words, whole(16, 1_000_000), 256)
    shown = str(tokens or "64; with --trace the length in the log")
    add("--output-len", "longest output, in tokens", whole(2, 100_000), tokens, shown)
    shown = "float32 on a CPU, else auto"
    add("--dtype", "dtype of the model", shown=shown, choices=("auto", "bfloat16", "float16", "float32"))
    add("--output-json", "file for the figures", Path)


def _model(add: Add, name: str = "model", more: str = "", **kwargs: Any) -> None:
    add(name, f"folder or Hugging Face name of a model{more}", metavar="MODEL", **kwargs)


# By command: the module with its `run`, the additional packages that it needs, and the function that adds its arguments
# and has its help as docstring.
COMMANDS: dict[str, tuple[str, tuple[str, ...], Callable[[Add], None]]] = {
    "train-exit-head": ("vllm_specplugins.tools.training.command", TORCH, _train_exit_head),
    "train-jump": ("vllm_specplugins.tools.training.command", TORCH, _train_jump),
    "train-look-ahead": ("vllm_specplugins.tools.training.command", TORCH, _train_look_ahead),
    "calibrate": ("vllm_specplugins.tools.calibrate", ("vllm", *TORCH), _calibrate),
    "verify-lossless": ("vllm_specplugins.tools.verify_lossless", ("vllm", *TORCH), _verify_lossless),
    "check": ("vllm_specplugins.tools.check", ("rich",), _check),
    "doctor": ("vllm_specplugins.tools.doctor", ("vllm", "torch", "rich"), _doctor),
    "collect": ("vllm_specplugins.tools.collect", ("vllm", "torch", "rich"), _collect),
    "build-store": ("vllm_specplugins.tools.build_store", TORCH, _build_store),
    "bench": ("vllm_specplugins.tools.bench.command", ("vllm", *TORCH), _bench),
    "replay": ("vllm_specplugins.tools.replay.command", TORCH, _replay),
}
