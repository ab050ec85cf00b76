"""The `hf-specdec` command; `optimum-cli specdec` enters through the same door.

A command is one module in this folder, named after it: the first line of its docstring is its help, `add_arguments`
declares what it takes, `run` does it and returns the exit status. `COMMANDS` is the registry.
"""

import argparse
from collections.abc import Sequence

from . import env, pareto

COMMANDS = (env, pareto)


def main(argv: Sequence[str] | None = None, prog: str = "hf-specdec") -> int:
    """Run the command in `argv` (default: the process's own arguments) and return its exit status."""
    parser = argparse.ArgumentParser(prog=prog, description="Speculative decoding for transformers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        purpose = (command.__doc__ or "").partition("\n")[0]
        subparser = commands.add_parser(name, help=purpose, description=purpose)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)
