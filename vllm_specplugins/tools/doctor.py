"""`doctor`: what speculation would run on here, as a table or as JSON; 0 if it would be served, or else 1."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO
from typing import Any

from vllm_specplugins.config import ConfigError, brief
from vllm_specplugins.engine.harness.diagnosis import ADVICE, OK, PROBLEM, READY, Finding, diagnose

STYLES = {OK: "green", ADVICE: "yellow", PROBLEM: "bold red"}


def run(args: argparse.Namespace) -> int:
    """The command."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    raw = None
    if args.speculative_config is not None:
        try:
            raw = json.loads(args.speculative_config)
        except ValueError:
            raw = 0
        if not isinstance(raw, dict):
            raise ConfigError(f"--speculative-config must be a JSON object, not {brief(args.speculative_config)}.")
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # vLLM and its libraries have a lot to say
        findings = diagnose(raw, args.model)
    has_problem = any(finding.state == PROBLEM for finding in findings)
    ready = compact(READY if raw is None or has_problem else raw)
    if args.json:
        report = {"served": not has_problem, "ready": ready, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(findings, ready)
    return 1 if has_problem else 0


def compact(value: Mapping[str, Any]) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def _print(findings: list[Finding], ready: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, show_lines=False)
    for no_wrap in (True, False, False):
        table.add_column(no_wrap=no_wrap, overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.state, STYLES[finding.state]), finding.name, Text(finding.value))
    console = Console(highlight=False)
    console.print(table)
    value = f"--speculative-config {shlex.quote(ready)}"
    if count := sum(finding.state == PROBLEM for finding in findings):
        if any(finding.name == "configuration" and finding.state == PROBLEM for finding in findings):
            console.print(Text(f"This would be allowed: {value}"), soft_wrap=True)
        console.print(f"Not ready: {count} problem{'s' * (count > 1)}.")
    else:
        console.print(Text(f"Ready to use: {value}"), soft_wrap=True)
