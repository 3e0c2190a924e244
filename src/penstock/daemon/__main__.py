"""The command line of `python -m penstock.daemon`: reads the settings and runs the daemon."""

from __future__ import annotations

import argparse
import sys

from penstock.daemon.lifecycle import EXIT_SETTINGS, run_program
from penstock.settings import BadSettings, Settings, describe, load


def main() -> int:
    options = _options()
    try:
        settings = load(options.config, flags=dict(options.set or ()))
    except BadSettings as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_SETTINGS
    if options.settings:
        _list(settings)
        return 0
    return run_program(settings, accept_loss=options.accept_loss)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.daemon", description="The scheduler with its HTTP API."
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file; docs/settings.md lists the settings")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        type=_pair,
        action="append",
        help="one setting, as leases.ttl=20s; may be repeated",
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="start on a database file that has lost acknowledged work; the trail records it",
    )
    parser.add_argument(
        "--settings", action="store_true", help="list every setting with its source, and exit"
    )
    return parser.parse_args()


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=VALUE")
    return key.strip(), value.strip()


def _list(settings: Settings) -> None:
    listed = describe(settings)
    wide = max(len(setting.key) for setting in listed)
    for setting in listed:
        sys.stdout.write(f"{setting.key:{wide}}  {setting.value}  ({setting.source})\n")


if __name__ == "__main__":
    sys.exit(main())
