"""
How much code there is, by package: `make size`.

A code line carries a token that is neither comment nor docstring. Blank lines do not count.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "penstock"
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def main() -> None:
    files: dict[str, int] = defaultdict(int)
    lines: dict[str, int] = defaultdict(int)
    for path in SOURCES.rglob("*.py"):
        parts = path.relative_to(SOURCES).parts
        package = parts[0] if len(parts) > 1 else "penstock"
        files[package] += 1
        lines[package] += code_lines(path.read_text("utf-8"))
    for package in sorted(lines, key=lambda name: -lines[name]):
        print(f"{package:<12} {files[package]:>4} files {lines[package]:>7,} code lines")
    print(f"{'all':<12} {sum(files.values()):>4} files {sum(lines.values()):>7,} code lines")


if __name__ == "__main__":
    main()
