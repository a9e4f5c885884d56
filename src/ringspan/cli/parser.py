"""The parser of the command line: argparse, with errors of one line like those of the commands themselves."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class OneLineErrors(argparse.ArgumentParser):
    """A parser, also of subcommands, that says what is wrong and which --help to read, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)
