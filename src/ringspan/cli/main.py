"""``ringspan``: the entry point of the command line. Each command is a module of this package."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from ringspan import __version__
from ringspan.cli.parser import OneLineErrors
from ringspan.errors import RingspanError

# command -> (module with add_arguments(parser) and run(args) -> exit code, one line of help)
COMMANDS = {
    "demo": ("ringspan.cli.demo", "train a small language model with its sequence split over 4 processes, and in one"),
    "plan": ("ringspan.cli.plan", "choose layout and strategy for a mask on a machine, with costs and a report"),
    "check": ("ringspan.cli.check", "compare random masks and strategies with dense attention, or --model with one process"),
    "doctor": ("ringspan.cli.doctor", "show what this machine has, and which kernel is used for which tensors"),
    "bench": ("ringspan.cli.bench", "measure this machine: `cpu`, `plan`, `rank`, `layouts`, `pack`, `calibrate`, `cost`"),
}


def main(argv: Sequence[str] | None = None) -> int:
    if find_spec("rich") is None:
        install = "install it with: pip install 'ringspan[cli]' (in a clone: pip install '.[cli]')"
        print(f"ringspan: the command line needs rich; {install}", file=sys.stderr)
        return 2
    parser = OneLineErrors(prog="ringspan", description="Exact attention over one sequence that is split across many devices.")
    parser.add_argument("--version", action="version", version=f"ringspan {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command, (module, line) in COMMANDS.items():
        sub = commands.add_parser(command, help=line, description=line[0].upper() + line[1:] + ".")
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
    except BrokenPipeError:  # the reader of a pipe has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python can flush stdout at exit
        return 0
