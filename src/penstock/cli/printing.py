"""
Texts from jobs, on a terminal. A terminal obeys control codes: a stored one could move the cursor, set the
title, or answer in the user's name.

So whatever is printed for people has them replaced, visibly. JSON has them escaped already.
"""

from __future__ import annotations

import re
from typing import Any, Final

import click

#: All but tab and line feed: C0, DEL, C1, and what turns the direction of writing round.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
#: Colours of a job's own output are harmless, and a lone carriage return is how programs show progress.
_COLOR_OR_CONTROL: Final = re.compile(r"(\x1b\[[0-9;]{0,40}m|\r)|" + _CONTROL.pattern)


def printable(text: str) -> str:
    return _CONTROL.sub(_shown, text.replace("\r\n", "\n"))


def output(text: str) -> str:
    """What a job printed: with its colours."""
    return _COLOR_OR_CONTROL.sub(lambda found: found[1] or _shown(found), text)


def echo(text: str, *, err: bool = False) -> None:
    click.echo(printable(text), err=err)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def printed(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value
