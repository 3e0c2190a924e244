"""
One turn in an interpreter of its own: `python -m bench.turn module:function '[arguments]'`.

A module apart, because start methods that import the main module anew in every worker must find nothing heavy in it.
"""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    target, arguments = sys.argv[1:]
    module, _, function = target.partition(":")
    sample = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    main()
