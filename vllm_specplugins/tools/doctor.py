"""Implements `doctor`, which diagnoses whether and how speculation would run on this machine, as a table or as JSON."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO
from shlex import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_specplugins.engine.harness.diagnosis import ADVICE, OK, PROBLEM, READY, Finding, diagnose

STYLES = {OK: "green", ADVICE: "yellow", PROBLEM: "bold red"}


def run(args: argparse.Namespace) -> int:
    """Returns 0 if vLLM would serve the configuration, otherwise 1."""
    raw = args.speculative_config
    with quiet():
        findings = diagnose(raw, args.model, args.serve)
    problems = [finding.name for finding in findings if finding.state == PROBLEM]
    ready = json.dumps(READY if raw is None or problems else raw, separators=(",", ":"))
    if args.json:
        report = {"served": not problems, "ready": ready, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(findings, ready, problems)
    return 1 if problems else 0


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the output of vLLM and its libraries."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield


def _print(findings: list[Finding], ready: str, problems: list[str]) -> None:
    console, table = Console(highlight=False), Table(show_header=False)
    for no_wrap in (True, False, False):
        table.add_column(no_wrap=no_wrap, overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.state, STYLES[finding.state]), finding.name, Text(finding.value))
    console.print(table)
    if not problems or "configuration" in problems:
        words = "A valid configuration" if problems else "Ready to use"
        console.print(f"{words}: --speculative-config {quote(ready)}", soft_wrap=True, markup=False)
    if problems:
        console.print(f"Not ready: {len(problems)} problem{'s' * (len(problems) > 1)}.")
