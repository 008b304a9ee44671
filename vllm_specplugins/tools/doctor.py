"""`doctor`: what speculation would run on here, as a table or as JSON; 0 if it would be served, or else 1."""

import argparse
import json
import os
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_specplugins.engine.harness.diagnosis import ADVICE, OK, PROBLEM, READY, Finding, diagnose

STYLES = {OK: "green", ADVICE: "yellow", PROBLEM: "bold red"}


def run(args: argparse.Namespace) -> int:
    """The command."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    raw = args.speculative_config
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # vLLM and its libraries have a lot to say
        findings = diagnose(raw, args.model)
    has_problem = any(finding.state == PROBLEM for finding in findings)
    ready = json.dumps(READY if raw is None or has_problem else raw, separators=(",", ":"))
    if args.json:
        report = {"served": not has_problem, "ready": ready, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(findings, ready)
    return 1 if has_problem else 0


def _print(findings: list[Finding], ready: str) -> None:
    table = Table(show_header=False)
    for no_wrap in (True, False, False):
        table.add_column(no_wrap=no_wrap, overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.state, STYLES[finding.state]), finding.name, Text(finding.value))
    console = Console(highlight=False)
    console.print(table)
    words = "Ready to use"
    problems = [finding.name for finding in findings if finding.state == PROBLEM]
    if problems:
        words = "This would be allowed" if "configuration" in problems else ""
    if words:
        console.print(f"{words}: --speculative-config {shlex.quote(ready)}", soft_wrap=True, markup=False)
    if problems:
        console.print(f"Not ready: {len(problems)} problem{'s' * (len(problems) > 1)}.")
