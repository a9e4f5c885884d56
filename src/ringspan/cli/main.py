"""``ringspan``: one command, a few words to follow it. Each word is a module here."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ringspan import __version__
from ringspan.errors import RingspanError

# word -> (module with add_arguments(parser) and run(args) -> exit code, one line of help)
COMMANDS = {
    "demo": ("ringspan.cli.demo", "train a small language model on a sequence split over 4 processes, beside one process"),
    "plan": ("ringspan.cli.plan", "which layout and strategy a mask should have on a machine, what it costs, and a report"),
    "check": ("ringspan.cli.check", "random masks, layouts and strategies against dense float64 attention"),
    "doctor": ("ringspan.cli.doctor", "what this machine has, and which kernel would serve which tensors"),
    "bench": ("ringspan.cli.bench", "measure this machine: `bench cpu`, `plan`, `rank`, `layouts`, `calibrate`, `cost`"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ringspan", description="Exact attention over one sequence that is split across many devices."
    )
    parser.add_argument("--version", action="version", version=f"ringspan {__version__}")
    words = parser.add_subparsers(dest="command", metavar="command", required=True)
    for word, (module, line) in COMMANDS.items():
        sub = words.add_parser(word, help=line, description=line[0].upper() + line[1:] + ".")
        importlib.import_module(module).add_arguments(sub)
    args = parser.parse_args(argv)
    try:
        code: int = importlib.import_module(COMMANDS[args.command][0]).run(args)
        sys.stdout.flush()
        return code
    except RingspanError as error:
        print(f"ringspan {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python would complain at exit
        return 0
