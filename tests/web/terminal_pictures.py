"""
Pictures of a terminal, as SVG: what the command prints in a window of a given width, in colour.

Rich draws them. Its own template loads a font from another host; ours names the fonts that machines have.
"""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from penstock.cli.top import Top
from tests.daemon import environment

WIDTH = 100
#: The states that have a reason.
UNDONE = ["-s", "queued", "-s", "failed", "-s", "blocked"]
FONT_FACES = re.compile(r"@font-face \{\{.*?\}\}\n", re.DOTALL)
TEMPLATE = FONT_FACES.sub("", CONSOLE_SVG_FORMAT).replace(
    "font-family: Fira Code, monospace",
    "font-family: ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace",
)


def take_terminals(daemon, jobs, folder):
    for name, width, words in (
        ("ls", WIDTH, ["ls", *UNDONE]),
        ("ls-60", 60, ["ls", *UNDONE]),
        ("explain", WIDTH, ["explain", jobs["failed"]]),
        ("show", WIDTH, ["show", jobs["failed"]]),
        ("addons", WIDTH, ["addons"]),
    ):
        shown = [word[-8:] if word in jobs.values() else word for word in words]
        draw(
            folder / f"terminal-{name}.svg",
            f"$ penstock {' '.join(shown)}\n{said(daemon, width, words)}",
            width,
        )
    asyncio.run(draw_top(daemon, folder / "terminal-top.svg"))


def said(daemon, width, words):
    """What the command writes to a terminal of this width, with its colours."""
    env = environment(
        PENSTOCK_URL=daemon.url,
        PENSTOCK_TOKEN=daemon.token,
        COLUMNS=str(width),
        LINES="40",
        TERM="xterm-256color",
    )
    env.pop("NO_COLOR", None)
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=theirs, stderr=theirs, env=env):
        os.close(theirs)
        pieces = []
        while True:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            pieces.append(piece)
    os.close(ours)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def draw(path, text, width):
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(
            record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=False)
        console.save_svg(str(path), title="", theme=MONOKAI, code_format=TEMPLATE, unique_id=path.stem)


async def draw_top(daemon, path):
    app = Top(daemon.client)
    async with app.run_test(size=(WIDTH, 26)) as pilot:
        await pilot.pause(3.0)  # two answers, so that the flow shows
        svg = app.export_screenshot(title="penstock top")
    path.write_text(
        re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace"),
        "utf-8",
    )


if __name__ == "__main__":
    sys.exit("make screenshots draws them")
