"""`vllm-specplugins`, or `python -m vllm_specplugins`: the command line. Parses arguments and imports nothing heavy
before a command runs."""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import getdoc
from pathlib import Path
from signal import SIG_DFL, SIGINT, default_int_handler, getsignal, signal
from typing import NoReturn

from vllm_specplugins import __version__
from vllm_specplugins.arguments import adder
from vllm_specplugins.commands import COMMANDS
from vllm_specplugins.config import ConfigError
from vllm_specplugins.config.fields import error_text

PROG = "python -m vllm_specplugins" if Path(sys.argv[0]).name == "__main__.py" else "vllm-specplugins"
CLEAN_UP_S = 2.0  # after Ctrl-C; another one is ignored meanwhile


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message.removeprefix('argument ').rstrip('.')}.\n")


def parser() -> Parser:
    from vllm_specplugins.methods import METHODS
    from vllm_specplugins.parsing import registered_methods

    commands = Parser(
        prog=PROG,
        description="Tools for speculative decoding.",
        epilog=f"Methods of --speculative-config: {', '.join((*METHODS, *registered_methods()))}.",
    )
    commands.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = commands.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, _, add_arguments) in COMMANDS.items():
        words, _, example = (getdoc(add_arguments) or "").partition("\n\n")
        add_arguments(adder(subparsers.add_parser(name, help=words, description=words, epilog=example)))
    return commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 2, with one sentence on stderr, if the command cannot run; 130 if it
    was interrupted."""
    args = parser().parse_args(arguments)
    module, packages, _ = COMMANDS[args.command]
    try:
        for name in packages:
            if find_spec(name) is None:
                raise ConfigError(f"{args.command} needs {name}, which is not installed (pip install {name}).")
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"{args.command}: loading; the first time, this takes one or two minutes\n")
        run = import_module(module).run
        with _interruptible():
            return int(run(args))
    except ConfigError as error:
        problem = str(error)
    except (ImportError, OSError) as error:  # such as another vLLM, or a full disk under standard output
        problem = f"{args.command} stopped ({getattr(error, 'strerror', None) or error_text(error)})."
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return 130
    sys.stderr.write(f"{PROG} {args.command}: error: {problem}\n")
    return 2


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turns Ctrl-C into an exception, and then gives a command CLEAN_UP_S to clean up."""
    if getsignal(SIGINT) is not SIG_DFL:
        yield
        return
    last = -math.inf

    def interrupt(*_: object) -> None:
        nonlocal last
        if time.monotonic() - last > CLEAN_UP_S:
            last = time.monotonic()
            raise KeyboardInterrupt

    signal(SIGINT, interrupt)
    try:
        yield
    finally:
        signal(SIGINT, SIG_DFL)


def program() -> int:
    """Runs `main` in a process that Ctrl-C ends at once, without a traceback, if there is nothing to clean up."""
    if getsignal(SIGINT) is default_int_handler:  # a shell ignores it for background processes
        signal(SIGINT, SIG_DFL)
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # for names that are not UTF-8
    return main()


if __name__ == "__main__":
    sys.exit(program())
