"""`penstock` and `python -m penstock`: the command, or the name of the extra that it needs."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from penstock.cli.main import main as command  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as missing:
        if (missing.name or "penstock").partition(".")[0] == "penstock":
            raise
        sys.stderr.write(
            f"penstock: the command needs {missing.name}, which is not installed here.\n"
            '          pip install "penstock[jobs]" adds the scheduler, its daemon, this command and the page.\n'
        )
        sys.exit(2)
    command()


if __name__ == "__main__":
    main()
