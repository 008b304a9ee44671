"""Writes docs/logs.md from the warnings and errors in the code, and from ACTIONS: `python docs/logs.py`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")
# How a line begins after its first value, and what to do. Each line has one entry, and each entry one line.
ACTIONS = {
    "vllm-specplugins: the package at": "Reinstall the package that the line names.",
    "vllm-specplugins: …": "Rename the method in its package, or remove the package.",
    "vllm-specplugins does not support": "Install vLLM 0.32 or 0.33, or ignore it: vLLM serves as without the plugin.",
    "vllm-specplugins was tested": "Run `verify-lossless`, or install a version that was tested.",
    "vllm-specplugins …; the server": "Read the reason. Set VLLM_SPECPLUGINS_ON_ERROR=refuse if a server must not run so.",
    "…; the server runs": "Read the reason. Set VLLM_SPECPLUGINS_ON_ERROR=refuse if a server must not run so.",
    "…: no trimming": "Set the attention backend that the line names, or keep it.",
    "cascade: vLLM's": "Remove the setting from the stage.",
    "A request has the key": "Correct the client's option.",
    "… This is logged once.": "Correct the client's options; use vLLM's Python front end for a 400.",
    "VLLM_USE_RUST_FRONTEND": "Set the port, or use the Python front end.",
    "… calls of check_options": "Make `check_options` faster; it must not wait or use `re`.",
    "grammar drafts nothing: the structured": "Set `--structured-outputs-config.backend xgrammar`.",
    "grammar drafts nothing: the model": "Remove the stage `grammar` for this model.",
    "grammar cannot draft": "None; report it if `faults_total` grows.",
    "learn trains nothing": "Remove `learn`.",
    "learn: training stops": "Restart to train again; report the exception.",
    "learn: training starts": "Choose another `path` to keep the old weights.",
    "learn: weights cannot": "Free the disk, or correct the rights of `path`.",
    "The start cannot measure": "None; report it.",
    "The engine cannot export a report": "Report it.",
    "The engine cannot export metrics": "Choose a free port.",
    "The engine stops exporting": "Restart the server at a quiet time; report the exception.",
    "The engine stops counting": "Restart the server at a quiet time; report the exception.",
    "specplugins_gate": "None: an operator did this.",
    "torch.compile failed": "Install the compiler that the line names.",
    "The engine stops: ": "Choose another method for this model.",
    "The proposer": "Correct the class (`check` finds this), and restart.",
    "Self-check": "Run `doctor`, and report its output.",
    "Shutdown": "Check the disk of `store_path` and `learn.path`.",
    "…: the circuit breaker closes": "None.",
    "… … (…). ….": "Find the line of the class; see the cause in [faults](metrics.md#symptoms).",
    "… failed": "Find the line of the class; drafting resumes after the pause, which doubles.",
    "… … (…) on one": "Correct the class; the orchestrator restarts the server.",
    "remote drafts nothing": "Start or correct the drafter's server.",
    "remote: … refused": "Raise the drafter's `--max-model-len`, or give it the target's tokenizer.",
    "suffix_lookup shares no outputs": "Check Redis and the network.",
    "suffix_lookup: … has": "None; expect fewer drafts at first.",
    "suffix_lookup: …. The store": "None, or restore the file's copy before the start.",
    "suffix_lookup: …. Outputs": "Free the disk, correct the rights, or end the other engine.",
}
# An example in place of a line that is mostly values, by the line's beginning in ACTIONS.
EXAMPLES = {
    "vllm-specplugins: …": "vllm-specplugins: the method 'mine' of the package 'pkg' is refused: another entry point "
    "registers the same name.",
    "vllm-specplugins …; the server": "vllm-specplugins does not support vLLM's model runner XPUModelRunner; the server "
    "runs without speculative decoding.",
    "…; the server runs": "vllm-specplugins does not support this vLLM (vllm/v1/x.py: Y is missing; the plugin supports "
    "vLLM >=0.32,<0.34); the server runs with eagle3 alone.",
    "… This is logged once.": "A request bypassed vLLM's Python front end and runs without its options: specplugins: "
    "max_draft must be an integer from 0 to 31, not 99. This is logged once.",
    "… calls of check_options": "2 calls of check_options have not returned. Until one does, requests with options of a "
    "custom proposer get no drafts.",
    "The engine stops: ": "The engine stops: jump: model must be a decoder whose body passes `inputs_embeds` unchanged "
    "to its layers, as vLLM's Llama does, not GPT2LMHeadModel.",
    "…: the circuit breaker closes": "Stage 0 (custom): the circuit breaker closes after 30 s, and drafting resumes.",
    "… … (…). ….": "Stage 0 (custom) raised an exception (KeyError: 7, at mine.py:31). Requests continue. "
    "Later faults of this kind are only counted.",
    "… failed": "Stage 0 (custom) failed 3 times in 1000 steps: the circuit breaker opens for 30 s. Requests "
    "continue without drafts.",
    "… … (…) on one": "Stage 1 (custom) raised an exception (KeyError: 7) on one of several ranks. The engine stops: "
    "all ranks must draft alike.",
    "suffix_lookup: … has": "suffix_lookup: /data/outputs.bin has 2 damaged texts, which are skipped.",
    "suffix_lookup: …. The store": "suffix_lookup: the store /data/outputs.bin was made with another tokenizer. The "
    "store starts empty and replaces the file.",
    "suffix_lookup: …. Outputs": "suffix_lookup: the store /data/outputs.bin cannot be saved (No space left on device). "
    "Outputs stay in memory, and saving is tried again.",
    "remote: … refused": "remote: http://drafter:8000/v1 refused a request (HTTP 400), which continues without drafts. "
    "This is logged once.",
    "…: no trimming": "cascade: no trimming on the device, because attention backend FLASH_ATTN does not support it; "
    "the scheduler sets draft lengths one step ahead. Use FLASHINFER to trim drafts (vLLM: adaptive verification ...).",
}
BEGINNING = """# Logs

<!-- Written by docs/logs.py; edit the sentences in the code, and the actions in docs/logs.py. -->

All lines of the plugin have the logger `vllm.specplugins`. "…" stands for a value, and lines in quotes are examples.
Requests continue after each line, unless the line says that the engine or the server stops.
`VLLM_LOGGING_LEVEL=DEBUG` adds the traceback of a fault.

At the start, one INFO line has the plan, as in "cascade: drafts on the host; synchronous scheduling (required by
grammar); the gate sets draft lengths; no trimming on the device (drafts have exact lengths)." While requests run,
"Speculation so far" shows totals every ten seconds.

These lines of vLLM appear with speculation:

- "max_num_scheduled_tokens is set to ... suboptimal performance", twice: `--max-num-batched-tokens` is below 8192. The
  plugin takes no tokens from it; raise it if long prompts are slow.
- "SpecDecoding metrics: ...": totals of ten seconds, with an acceptance rate for each of K positions. The rates after
  the longest draft are 0.
- "CUDAGraphMode... is not supported with spec-decode for attention backend ...": steps run without full graphs, and
  drafts are not trimmed. Choose the backend that our line names.
- "Model Runner V2 requires Triton; using the V1 model runner instead": drafts run on the host, as on a CPU.
- "Using custom scheduler class vllm_specplugins...": the plugin plans draft lengths in a subclass of vLLM's scheduler.
- "Unknown vLLM environment variable detected: VLLM_SPECPLUGINS_...": vLLM does not know the plugin's variables; they work.
- "Speculative decoding on CPU without Intel OpenMP ...": preload libiomp5, as `examples/environment.sh` does.
- "Async scheduling not supported with ngram-based speculative decoding": vLLM's `ngram` runs, not `prompt_lookup`.

| level | line | do |
|---|---|---|
"""


def lines() -> Iterator[tuple[str, str]]:
    """The level and the sentence of each warning and error in the code."""
    for path in sorted((ROOT / "vllm_specplugins").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            node.targets[0].id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and is_text(node.value)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
            level = {"logger.warning": "warning", "logger.error": "error", "_warn": "warning"}.get(
                ast.unparse(call.func)
            )
            if level and not isinstance(call.args[0], ast.Starred):
                text = call.args[0].value if is_text(call.args[0]) else names[ast.unparse(call.args[0])]
                yield level, re.sub(r"%(\.\d)?[sdf]", "…", text)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def action(line: str) -> str:
    """The action of the entry that begins the line, the longest of several."""
    fits = [beginning for beginning in ACTIONS if line.startswith(beginning)]
    return max(fits, key=len, default="")


def shown(line: str) -> str:
    """The line with "…" for values, or its example in quotes."""
    example = EXAMPLES.get(action(line))
    return f'"{example}"' if example else line.replace("|", " ")


def page() -> str:
    rows = [f"| {level} | {shown(line)} | {ACTIONS[action(line)]} |" for level, line in sorted(set(lines()))]
    return BEGINNING + "".join(re.sub(r"VLLM_[A-Z_]+(=\w+)?", r"`\g<0>`", f"{row}\n") for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page())
