"""
Odd ends of functions. Each of them is legal Python, and each once broke something that ran beside it.

Every one is a function without arguments at the top of this module, so that worker processes find it by name. `STATES` says where a job with it ends.
"""

from __future__ import annotations

import asyncio
import os
import sys

import penstock

# Exceptions whose text cannot be stored


def surrogate_in_the_message():
    raise OSError(f"no such file: {os.fsdecode(b'caf' + bytes([0xE9]) + b'.txt')}")


def nul_in_the_message():
    raise ValueError("before\0after")


def huge_message():
    raise ValueError("x" * 3_000_000)


def no_message():
    raise ValueError


def bytes_as_message():
    raise ValueError(b"\xff\xfe\0")


def note_with_a_surrogate():
    error = ValueError("with a note")
    error.add_note("caf\udce9")
    raise error


# Exceptions that break whatever formats them


class _StrRaises(Exception):
    def __str__(self):
        raise ZeroDivisionError("no text for you")


class _ReprRaises(Exception):
    def __str__(self):
        raise ZeroDivisionError("no text for you")

    __repr__ = __str__


class _StrExits(Exception):
    def __str__(self):
        raise SystemExit(4)

    __repr__ = __str__


class _StrIsNumber(Exception):
    def __str__(self):
        return 5  # noqa: PLE0307  # the mistake is the point


class _StrRecurses(Exception):
    def __str__(self):
        return str(self)

    __repr__ = __str__


class _OddText(str):
    __slots__ = ()

    def __refuse(self, *_, **__):
        raise ZeroDivisionError("not this text")

    encode = replace = isascii = __len__ = __format__ = __getitem__ = __contains__ = __str__ = __refuse


class _StrIsOdd(Exception):
    def __str__(self):
        return _OddText("odd")


class _ClassRaises(Exception):
    @property
    def __class__(self):
        raise ZeroDivisionError("no class for you")


class _NoteRaises(Exception):
    def add_note(self, _):
        raise ZeroDivisionError("no notes here")

    def __setattr__(self, name, value):
        raise ZeroDivisionError(f"no {name} here")


def str_raises():
    raise _StrRaises


def repr_raises():
    raise _ReprRaises


def str_exits():
    raise _StrExits


def str_is_a_number():
    raise _StrIsNumber


def str_recurses():
    raise _StrRecurses


def str_is_an_odd_text():
    raise _StrIsOdd


def class_raises():
    raise _ClassRaises


def note_raises():
    raise _NoteRaises


def notes_that_are_no_list():
    error = ValueError("with notes")
    error.__notes__ = 7
    raise error


def cause_of_itself():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def class_of_the_function():
    class Inner(Exception):
        pass

    raise Inner("defined inside")


class _Awkward(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def does_not_unpickle():
    raise _Awkward(1, 2)


class _NotPickled(Exception):
    def __reduce__(self):
        raise SystemExit(5)


def pickling_exits():
    raise _NotPickled("stays here")


def group_of_exceptions():
    raise ExceptionGroup("two", [ValueError("one\udce9"), _StrRaises()])


def endless_recursion():
    return endless_recursion()


# Exceptions that are no Exception


class _OwnBase(BaseException):
    pass


def own_base_exception():
    raise _OwnBase("not an Exception")


def group_of_base_exceptions():
    raise BaseExceptionGroup("two", [KeyboardInterrupt(), _OwnBase()])


def canceled_error():
    raise asyncio.CancelledError


def keyboard_interrupt():
    raise KeyboardInterrupt


def generator_exit():
    raise GeneratorExit


def system_exit():
    sys.exit(3)


def system_exit_with_a_text():
    sys.exit("caf\udce9")


def stop_iteration():
    raise StopIteration(5)


# Results


def nan():
    return float("nan")


def infinity_inside():
    return {"loss": [1.5, float("inf")]}


def contains_itself():
    result = []
    result.append(result)
    return result


def too_deep():
    result = []
    for _ in range(100_000):
        result = [result]
    return result


def too_large():
    return "x" * 2_000_000


def not_serialisable():
    return object()


def object_that_raises():
    return _Shy()


class _Shy:
    def __repr__(self):
        raise SystemExit(6)

    __str__ = __iter__ = __repr__

    @property
    def __dict__(self):
        raise ZeroDivisionError("nothing to see")


def class_inside():
    class Inner:
        pass

    return Inner


def surrogate_in_the_result():
    return {"caf\udce9": ["\udce9", "é"]}


def nul_in_the_result():
    return "a\0b"


RAISING = {
    function.__name__: function
    for function in (
        surrogate_in_the_message, nul_in_the_message, huge_message, no_message, bytes_as_message, note_with_a_surrogate, str_raises,
        repr_raises, str_exits, str_is_a_number, str_recurses, str_is_an_odd_text, class_raises, note_raises, notes_that_are_no_list,
        cause_of_itself, class_of_the_function, does_not_unpickle, pickling_exits, group_of_exceptions, endless_recursion, own_base_exception,
        group_of_base_exceptions, canceled_error, keyboard_interrupt, generator_exit, system_exit, system_exit_with_a_text, stop_iteration,
    )
}  # fmt: skip
RETURNING = {
    function.__name__: function
    for function in (
        nan, infinity_inside, contains_itself, too_deep, too_large, not_serialisable, object_that_raises, class_inside,
        surrogate_in_the_result, nul_in_the_result,
    )
}  # fmt: skip
POISONS = RAISING | RETURNING
#: What can be stored, with a sign in the place of what cannot.
STORED = {"surrogate_in_the_result": {"caf\ufffd": ["\ufffd", "é"]}, "nul_in_the_result": "a\0b"}
STATES = {name: "DONE" if name in STORED else "FAILED" for name in POISONS}
NOT_FINITE = {
    "nan": "the result holds NaN: JSON has no NaN and no infinity",
    "infinity_inside": "the result holds infinity at ['loss'][1]: JSON has no NaN and no infinity",
}


def neighbour(n):
    """An innocent job beside the others."""
    return n + 1


def leave_at_once():
    """For processes of their own: nothing can be said about it afterwards."""
    os._exit(7)


def checkpoints():
    """Talks to its scheduler while it runs."""
    job = penstock.current_job()
    job.save_checkpoint("saved")
    return job.checkpoint


class Handler:
    """A poison as the function of an SDK worker, which processes find by name."""

    def __init__(self, name):
        self._name = name

    def __call__(self, _job):
        return leave_at_once() if self._name == "leave_at_once" else POISONS[self._name]()


class AsyncHandler(Handler):
    async def __call__(self, job):
        return super().__call__(job)


def handled_neighbour(_job, n):
    return n + 1
