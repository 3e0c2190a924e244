"""Bugs that let an odd text or exception of user code break something beside it."""

from __future__ import annotations

from tests.mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "poison: a lone surrogate stays in the text",
        "penstock/core/text.py",
        "storable",
        "        text = _SURROGATES.sub(_REPLACED, text)\n",
        "        pass\n",
        ("tests/core/test_text.py",),
    ),
    Mutant(
        "poison: a text that exits is let through",
        "penstock/core/text.py",
        "_formatted",
        "        return storable(form(value), most)\n    except BaseException as error:",
        "        return storable(form(value), most)\n    except Exception as error:",
        ("tests/core/test_text.py",),
    ),
    Mutant(
        "poison: NaN is written as null",
        "penstock/core/text.py",
        "checked_json",
        '    if b"null" in text:\n',
        "    if False:\n",
        ("tests/library/test_poison.py", "-k", "nan_is_refused"),
    ),
    Mutant(
        "poison: what a worker says is written as it came",
        "penstock/scheduler/job_service.py",
        "_storable",
        "        None if error is None else storable(error, _MAX_ERROR),\n",
        "        error,\n",
        ("tests/scheduler/test_apart.py", "-k", "not postgres"),
    ),
    Mutant(
        "poison: one that cannot be written takes its batch along",
        "penstock/stores/api.py",
        "committed_apart",
        "        if len(items) == 1:\n            return [error]\n",
        "        raise\n",
        ("tests/scheduler/test_apart.py", "-k", "not postgres"),
    ),
    Mutant(
        "poison: a result that cannot be written leaves its job running",
        "penstock/scheduler/job_service.py",
        "JobService._ended",
        "                    left[i] = _not_written(report, written)\n",
        "",
        ("tests/scheduler/test_apart.py", "-k", "not postgres"),
    ),
    Mutant(
        "poison: an exchange that fails takes its outcomes along",
        "penstock/scheduler/job_service.py",
        "JobService._completed",
        "                return ending.result()\n            except Unavailable:\n                raise\n            except Exception:\n",
        "                return ending.result()\n            except OSError:\n",
        ("tests/scheduler/test_apart.py", "-k", "not postgres"),
    ),
    Mutant(
        "poison: a body that is not UTF-8 is read",
        "penstock/server/request.py",
        "Decoder.__call__",
        "        if not _is_utf8(body):\n",
        "        if False:\n",
        ("tests/server/test_bad_input.py", "-k", "not_utf8"),
    ),
    Mutant(
        "poison: an argument that is not UTF-8 ends in a traceback",
        "penstock/client/client.py",
        "_body",
        "    except UnicodeEncodeError:\n",
        "    except TypeError:\n",
        ("tests/cli/test_refusals.py", "-k", "not_utf8"),
    ),
    Mutant(
        "poison: a BaseException leaves the call of an SDK worker",
        "penstock/work/outcome.py",
        "run",
        "    except BaseException as error:",
        "    except (Exception, SystemExit) as error:",
        ("tests/client/test_poison.py::test_a_call_comes_to_an_ending_and_never_raises",),
    ),
    Mutant(
        "poison: a result that cannot be encoded is told as an error of the function",
        "penstock/work/outcome.py",
        "_returned",
        "    except BaseException as error:  # noqa: BLE001  # a foreign type may raise anything\n",
        "    except TypeError as error:\n",
        ("tests/client/test_poison.py::test_a_call_comes_to_an_ending_and_never_raises",),
    ),
]
