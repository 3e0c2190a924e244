"""Bugs that let an odd text or exception of user code break something beside it."""

from __future__ import annotations

from tests.mutants.planting import planter

poison = planter("poison", "penstock/{}.py")
TEXT = ("tests/core/test_text.py",)
APART = ("tests/engine/test_apart.py", "-k", "not postgres")
CLIENT = "tests/client/test_poison.py"
CALLS = (f"{CLIENT}::test_a_call_comes_to_an_ending_and_never_raises",)

MUTANTS = [
    poison(
        "a lone surrogate stays in the text",
        "core/text",
        "        text = _SURROGATES.sub(_REPLACED, text)\n",
        "        pass\n",
        TEXT,
    ),
    poison(
        "a text that exits is let through",
        "core/text",
        "        return storable(form(value), most)\n    except BaseException as error:",
        "        return storable(form(value), most)\n    except Exception as error:",
        TEXT,
    ),
    poison(
        "NaN is written as null",
        "core/json_text",
        '    if b"null" in text:\n',
        "    if False:\n",
        ("tests/jobs/test_poison.py", "-k", "nan_is_refused"),
    ),
    poison(
        "what a worker says is written as it came",
        "engine/desk",
        "        None if error is None else storable(error, _MAX_ERROR),\n",
        "        error,\n",
        APART,
    ),
    poison(
        "one that cannot be written takes its batch along",
        "engine/apart",
        "        if len(operations) == 1:\n            return [error]\n",
        "        raise\n",
        APART,
    ),
    poison(
        "a result that cannot be written leaves its job running",
        "engine/desk",
        "                    left[i] = _not_written(report, written)\n",
        "",
        APART,
    ),
    poison(
        "an exchange that fails takes its outcomes along",
        "engine/desk",
        "                done, granted = self._completed(reports), []\n",
        "                raise\n",
        APART,
    ),
    poison(
        "a body that is not UTF-8 is read",
        "http/body",
        "        if not _is_utf8(body):\n",
        "        if False:\n",
        ("tests/http/test_bad_input.py", "-k", "not_utf8"),
    ),
    poison(
        "a BaseException leaves the call of an SDK worker",
        "client/handlers",
        "    except BaseException as error:  # noqa: BLE001  # whatever a job raises is",
        "    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a job raises is",
        CALLS,
    ),
    poison(
        "a result that raises leaves the call of an SDK worker",
        "client/handlers",
        "    except BaseException as error:  # noqa: BLE001  # a foreign type may raise anything\n",
        "    except TypeError as error:\n",
        CALLS,
    ),
]
