"""Implements `collect`, which packs the data that explains an incident: metrics, versions, the diagnosis and lines of
the log, without prompts and answers."""

import argparse
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from vllm_specplugins.config import ConfigError
from vllm_specplugins.config.fields import error_text
from vllm_specplugins.engine.harness.diagnosis import diagnose
from vllm_specplugins.tools.doctor import quiet
from vllm_specplugins.tools.report import say

NUM_LINES, LINE_LENGTH = 2000, 400  # last lines of the log; maximum number of characters of a line
TIMEOUT_S = 20
_TELLING = re.compile(r"\b(ERROR|WARNING|CRITICAL)\b|specplugins|Speculati|SpecDecod|speculative", re.IGNORECASE)
_SPOKEN = re.compile(r"Received request|prompt: |prompt_token_ids|Generated response|'input': ", re.IGNORECASE)
_PASSWORD = re.compile(r"(://[^\s:/@]*:)[^\s/@]+@")  # of an address
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|URL|CREDENTIAL", re.IGNORECASE)


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ConfigError if the log cannot be read, or if the file exists."""
    log = None if args.log is None else telling_lines(args.log)
    with quiet():
        findings = [asdict(finding) for finding in diagnose(args.speculative_config, None, args.serve, default=None)]
    parts = {"doctor.json": json.dumps(findings, indent=2), "environment.txt": "\n".join(environment()) + "\n"}
    for path in ("metrics", "version"):
        parts[f"{path}.txt"] = fetched(f"{args.url.rstrip('/')}/{path}")
    if log is not None:
        parts["log.txt"] = "\n".join(log) + "\n"
    try:
        with args.out.open("xb") as file, ZipFile(file, "w", ZIP_DEFLATED) as archive:
            for name, text in parts.items():
                archive.writestr(name, text)
    except FileExistsError:
        raise ConfigError(f"--out must be a new file, but {args.out} exists.") from None
    say(f"{args.out} holds {', '.join(parts)}. It has no prompts and no answers; read it before you send it.")
    return 0


def fetched(url: str) -> str:
    """Returns the server's answer, or the reason why there is none, since an incident may have ended the server."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        return f"{url} does not answer ({error_text(error)}).\n"


def environment() -> Iterator[str]:
    """Yields the variables of vLLM and of the plugin, without the values of secrets."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(("VLLM_", "NCCL_", "CUDA_", "HF_HUB_OFFLINE", "NUMBA_", "TRITON_")):
            yield f"{name}={'(hidden)' if _SECRET.search(name) else value}"


def telling_lines(log: Path) -> list[str]:
    """Returns warnings, errors and lines about speculation near the end of a log, without lines that may show a
    prompt."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()[-NUM_LINES:]
    except OSError as error:
        raise ConfigError(f"--log must be a readable file, not {log} ({error.strerror}).") from None
    telling = (line for line in lines if _TELLING.search(line) and not _SPOKEN.search(line))
    return [_PASSWORD.sub(r"\1(hidden)@", line)[:LINE_LENGTH] for line in telling]
