"""The parser of the command line: argparse, with errors of one line like those of the commands themselves."""

from __future__ import annotations

import argparse
import sys
from difflib import get_close_matches
from typing import Any, NoReturn


class OneLineErrors(argparse.ArgumentParser):
    """A parser, also of subcommands, that says what is wrong and which --help to read, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, or exit with an error that names what is not recognized, with the most similar option.

        argparse would report required arguments first, such as the --world that was written --wrld, and would name the
        main command instead of the subcommand.
        """
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False
        try:
            _, unknown = super().parse_known_args(args)
        finally:
            for action in required:
                action.required = True
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            near = [found for option in options for found in get_close_matches(option, known, n=1)]
            guess = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{guess}")
        return super().parse_known_args(args, namespace)
