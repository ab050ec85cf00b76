"""Make `optimum-cli specdec ...` another name of `hf-specdec ...`.

optimum imports every file in this PEP 420 namespace at the start of every `optimum-cli` command. So nothing of
hf_specdec is imported here: doing so would load torch for `optimum-cli --help`, and patch transformers for commands
that never asked for it.
"""

from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class SpecdecCommand(BaseOptimumCLICommand):
    """Hands everything after `specdec` to hf_specdec's own command line."""

    COMMAND = CommandInfo(name="specdec", help="Speculative decoding for transformers (hf_specdec).")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument(
            "specdec_arguments",
            nargs=REMAINDER,
            metavar="COMMAND ...",
            help="a command of hf-specdec, env for one, with its arguments; `hf-specdec --help` lists them",
        )

    def run(self) -> None:
        from hf_specdec.cli import main

        raise SystemExit(main(self.args.specdec_arguments, prog="optimum-cli specdec"))


REGISTER_COMMANDS = [SpecdecCommand]
