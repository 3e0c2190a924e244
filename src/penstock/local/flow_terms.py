"""The terms of `parallel_limit` and its sync twin: what both check at the call, and the outcome both can yield."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

from penstock.core.text import is_kind, type_name

__all__ = ["OnError", "Settled", "checked_errors", "checked_fn", "checked_n", "log", "raisable"]

T_co = TypeVar("T_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)

OnError = Literal["raise", "skip", "settled"]

log = logging.getLogger("penstock.flow")


@dataclass(frozen=True, slots=True)
class Settled(Generic[T_co, R_co]):
    """How the call for one item ended: with a value, or with the error it raised."""

    item: T_co
    value: R_co | None = None
    error: BaseException | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def result(self) -> R_co:
        """The value with its exact type, or the error raised: what `Future.result` does."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # no error: there is a value, if only a None that R allows


def checked_n(n: Any) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"n must be an int, not {n!r}: how many calls may be in progress at once")
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}: with no call in progress nothing would ever run")
    return operator.index(n)


def checked_fn(fn: Any) -> Callable[[Any], Any]:
    if not callable(fn):
        raise TypeError(
            f"fn must be callable, not {type(fn).__name__}: pass the function, not what it returns"
        )
    return fn  # type: ignore[no-any-return]  # callable() has no argument types to offer


def checked_errors(errors: Any) -> OnError:
    if errors not in get_args(OnError):
        raise ValueError(f"errors must be 'raise', 'skip' or 'settled', not {errors!r}")
    return errors  # type: ignore[no-any-return]  # the line above made sure


def raisable(error: BaseException) -> BaseException:
    """An iterator that raises StopIteration has come to its end: a call's must not pass for that (PEP 479)."""
    if not is_kind(error, (StopIteration, StopAsyncIteration)):
        return error
    wrapped = RuntimeError(f"a call raised {type_name(error)}")
    wrapped.__cause__ = error
    return wrapped
