"""The command line: ``zcomm`` or ``python -m zcomm``."""

import sys

NEEDED = ("rich", "typer", "yaml")


def main() -> None:
    """Entry point of the ``zcomm`` command."""
    try:
        from zcomm.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in NEEDED:
            raise
        sys.exit(f"zcomm's command line needs {error.name}: pip install zcomm[bench]")
    app()


if __name__ == "__main__":
    main()
