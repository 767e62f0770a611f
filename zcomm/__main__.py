"""The command line: ``zcomm info`` or ``python -m zcomm info``. All other commands are those of ``zcomm_bench``."""

import argparse

from zcomm import info
from zcomm._version import __version__


def main() -> None:
    """Entry point of the ``zcomm`` command."""
    parser = argparse.ArgumentParser(prog="zcomm", description="Compressed collectives for torch.distributed.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="info")
    commands.add_parser("info", help="show versions, codecs, and the options that the environment sets")
    parser.parse_args()
    try:
        print(info.text())
    except (TypeError, ValueError) as error:
        raise SystemExit(f"the environment holds a wrong option: {error}") from None


if __name__ == "__main__":
    main()
