"""Bugs that somebody could write into the ground: the error tree, the layers, the public names and what they cost."""

from __future__ import annotations

ERRORS = "penstock/core/errors.py"
PACKAGE = "penstock/__init__.py"


def in_errors(name: str, old: str, new: str) -> tuple[str, str, str, str, tuple[str, ...]]:
    return f"errors: {name}", ERRORS, old, new, ("tests/core/test_errors.py",)


def in_layers(name: str, file: str, old: str, new: str) -> tuple[str, str, str, str, tuple[str, ...]]:
    return f"layers: {name}", file, old, new, ("tests/test_layers.py",)


def in_exports(name: str, file: str, old: str, new: str) -> tuple[str, str, str, str, tuple[str, ...]]:
    return f"exports: {name}", file, old, new, ("tests/test_exports.py",)


MUTANTS = [
    in_errors("one is missing in the drawing", "    │   ├── QueueDropError     a load-shedding policy refused or evicted it\n", ""),
    in_errors("one hangs elsewhere than drawn", "class QueueDropError(CallEnded):", "class QueueDropError(PenstockError):"),
    in_errors("one is not the standard error that the drawing says", "class CallTimeout(CallEnded, TimeoutError):", "class CallTimeout(CallEnded):"),
    in_errors("a cancelled call is no CancelledError", "class CallCanceled(CallEnded, CancelledError):", "class CallCanceled(CallEnded):"),
    in_errors("a cancelled call cancels the task", "from concurrent.futures import CancelledError\n", "from asyncio import CancelledError\n"),
    in_errors("a closed pool is no RuntimeError", "class PoolClosedError(CallEnded, RuntimeError):", "class PoolClosedError(CallEnded):"),
    in_errors("one is not exported", '    "WorkerCrashedError",\n', ""),
    in_errors("two have one code", '    code = "closed"\n', '    code = "dropped"\n'),
    in_errors("fields are no attributes", '            return self.__dict__["data"][name]\n', "            raise KeyError\n"),
    in_errors("fields are looked for for ever", 'self.__dict__["data"][name]', "self.data[name]"),
    in_errors("a missing field is not named", '''f"{type(self).__name__!r} has no attribute {name!r}"''', "name"),
    in_errors("the problem has no data", '"data": self.data}', '"data": {}}'),
    in_errors("fields do not travel", "self.args[0], self.data)", "self.args[0], {})"),
    in_errors("the kind does not travel", "    return kind(message, **data)\n", "    return PenstockError(message, **data)\n"),
    in_layers("deciding asks for the time", "penstock/core/ticket.py", "import math\n", "import math\nimport time as _time\n"),
    in_layers("deciding knows the day", "penstock/core/spend.py", "from enum import StrEnum\n", "from enum import StrEnum\n\nTODAY = datetime.now(UTC)\n"),
    in_layers("deciding knows a pool", ERRORS, "from typing import Any, Self\n", "from typing import Any, Self\n\nif not Any:\n    import penstock.local.gate\n"),
    in_layers("a pool knows the demo", "penstock/local/options.py", "import math\n", "import math\n\nif not math:\n    import penstock.demo\n"),
    in_exports("a name leads nowhere", PACKAGE, '    "penstock.local.task": ("Task",),\n', '    "penstock.local.task": ("Tusk",),\n'),
    in_exports("any name is there", PACKAGE, "        raise AttributeError(", "        return ("),
    in_exports("dir() knows nothing", PACKAGE, "    return __all__\n", "    return []\n"),
    in_exports("not every name is exported", PACKAGE, "*sorted(_home_of)]", "*sorted(_home_of)[1:]]"),
    in_exports("type checkers miss a name", PACKAGE, "    from penstock.local.task import Task as Task\n", ""),
    in_exports("the import loads asyncio", PACKAGE, "from typing import TYPE_CHECKING, Any\n", "import asyncio\nfrom typing import TYPE_CHECKING, Any\n"),
    in_exports("a pool loads asyncio", "penstock/local/options.py", "import math\n", "import asyncio\nimport math\n"),
    in_exports("a pool loads a package", "penstock/local/options.py", "import math\n", "import hypothesis\nimport math\n"),
    in_exports("a worker loads a package", "penstock/local/child.py", "import threading\n", "import threading\n\nimport hypothesis\n"),
]  # fmt: skip
