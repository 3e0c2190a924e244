"""
`JobContext`: what a running job function can read about its job and report.

    def index(path):
        job = penstock.current_job()
        done = job.checkpoint or 0
        for n, file in enumerate(files(path)[done:], done):
            ...
            job.progress(n / total)
            job.save_checkpoint(n + 1)
            job.check()  # raises here when the attempt must end

There is one class for functions in a program, an SDK worker and the runner; only its channel differs. A
function that is a generator runs in phases: each `yield` is a safe place to stop, and the yielded value is
the checkpoint.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import typing
from collections.abc import Callable, Collection, MutableMapping
from datetime import datetime
from decimal import Decimal
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Protocol

from penstock.core.errors import JobStopped
from penstock.core.jobs.types import DispatchId, Moment, Money, member_of, money_of, when
from penstock.core.text import checked_json, json_text

_NO_DISPATCH: Final = DispatchId("")


class JobFacts(NamedTuple):
    """The facts of one attempt that do not change. They can be sent to other processes."""

    job_id: str
    job_type: str
    dispatch_id: DispatchId = _NO_DISPATCH
    fence: int = 0
    attempt: int = 1
    addon: str = ""
    tags: tuple[str, ...] = ()
    deadline_at: Moment | None = None
    #: As JSON.
    payload: str = "null"
    #: As JSON. None: no attempt has saved one.
    checkpoint: str | None = None
    #: As JSON: id, state and result of each parent. None: the job has no parents.
    parents: str | None = None


class ParentResult(NamedTuple):
    """
    A job that this one waited for. `result` is also None if the parent is not DONE, or if all results
    together are too large.
    """

    job_id: str
    state: str
    result: Any


class JobChannel(Protocol):
    """
    The connection of a running function to its scheduler: an object of its process, shared memory or a
    socket.
    """

    @property
    def canceled(self) -> bool: ...

    @property
    def yielding(self) -> bool: ...

    def save_checkpoint(self, text: str) -> None:
        """Save the checkpoint; it is durable when this returns. Raises JobStopped if the lease is lost."""
        ...

    def progress(self, fraction: float) -> None: ...

    def spend(self, total: Money, amount: Money) -> None:
        """Report spending. `total`: all that this attempt has spent, including `amount`."""
        ...

    def log_handler(self) -> logging.Handler | None:
        """A handler for the job's own log. None: log records go to the log of the program."""
        ...


class JobContext:
    """
    The job that runs, as its function sees it.

    `attempt` counts from 1 and grows with each failure. `fence` grows with each start. Give the fence to an
    outside system that refuses older numbers, so that an attempt which was given up can do no harm there.

    For example:

        @scheduler.job
        def crawl(ctx: penstock.JobContext, site: str) -> int:
            page = ctx.checkpoint or 0
            while page < 3:
                page += 1
                ctx.progress(page / 3)
                ctx.save_checkpoint(page)
                ctx.check()  # raises if the attempt must end
            return page
    """

    def __init__(self, facts: JobFacts, channel: JobChannel) -> None:
        self._facts, self._channel = facts, channel
        self._spent: Money = 0
        self._checkpoint = facts.checkpoint
        self._log: _JobLog | None = None

    @property
    def id(self) -> str:
        return self._facts.job_id

    @property
    def job_type(self) -> str:
        return self._facts.job_type

    @property
    def attempt(self) -> int:
        return self._facts.attempt

    @property
    def fence(self) -> int:
        return self._facts.fence

    @property
    def addon(self) -> str:
        return self._facts.addon

    @property
    def tags(self) -> tuple[str, ...]:
        return self._facts.tags

    @property
    def array_index(self) -> int | None:
        """The index of a job of an array. None: the job is in no array."""
        member = member_of(self._facts.job_id)
        return None if member is None else member[1]

    @property
    def deadline(self) -> datetime | None:
        moment = self._facts.deadline_at
        return None if moment is None else when(moment)

    @property
    def parents(self) -> tuple[ParentResult, ...]:
        """The jobs that this one waited for, in the order of its `after`, with their results."""
        return tuple(ParentResult(*parent) for parent in json.loads(self._facts.parents or "[]"))

    # when to stop

    @property
    def canceled(self) -> bool:
        """
        Whether the job was canceled, is out of time or money, or lost its lease. If so, stop now: the
        scheduler refuses the result.
        """
        return self._channel.canceled

    @property
    def should_yield(self) -> bool:
        """
        Whether the attempt should end, for a more urgent job, a stop of the program or a cancel. If so, save
        a checkpoint and call `check()`.
        """
        return self._channel.yielding or self._channel.canceled

    def check(self) -> None:
        """
        Raise JobStopped if the attempt should end. A job that yields in this way goes back to the queue.
        """
        if self.should_yield:
            raise JobStopped("this attempt was asked to end", job_id=self.id)

    # reports

    @property
    def checkpoint(self) -> Any:
        """The last checkpoint of this attempt or an earlier one. None: there is none."""
        return None if self._checkpoint is None else json.loads(self._checkpoint)

    def save_checkpoint(self, value: Any) -> None:
        """
        Save a value that JSON can represent. It is durable when this returns; the next attempt begins with
        it.
        """
        text = json_of(value, "the checkpoint")
        self._channel.save_checkpoint(text)
        self._checkpoint = text

    def progress(self, fraction: float, message: str | None = None) -> None:
        """Report progress from 0 to 1. Cheap: the next heartbeat carries it. `message` goes to `log`."""
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ValueError(f"progress is {fraction!r}; it must be a number from 0 to 1")
        self._channel.progress(float(fraction))
        if message is not None:
            self.log.info("%d %%: %s", fraction * 100, message)

    def spend(self, amount: float | str | Decimal) -> None:
        """
        Report that this much more was spent, in the job's unit. At the job's cost_limit `canceled` becomes
        true.
        """
        try:
            millionths = -1 if isinstance(amount, bool) else money_of(amount)
        except ValueError:
            millionths = -1
        if millionths < 0:
            raise ValueError(f"amount is {amount!r:.60}; it must be a number of 0 or more")
        self._spent += millionths
        self._channel.spend(self._spent, millionths)

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records name the job. In the runner they go into the job's own log."""
        if self._log is None:
            self._log = _JobLog(self._logger(), {"job_id": self.id, "attempt": self.attempt})
        return self._log

    def _logger(self) -> logging.Logger:
        handler = self._channel.log_handler()
        name = f"penstock.job.{self.job_type}"
        if handler is None:
            return logging.getLogger(name)
        logger = logging.Logger(name, logging.INFO)  # noqa: LOG001  # apart from the loggers of the program
        logger.addHandler(handler)
        return logger

    def __repr__(self) -> str:
        return f"<JobContext {self.job_type} {self.id[-8:]}, attempt {self.attempt}>"


class _JobLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        if not self.logger.parent:  # the job's own log needs no id
            return msg, kwargs
        return f"[{str((self.extra or {}).get('job_id'))[-8:]}] {msg}", kwargs


class NoChannel:
    """The channel of a function that is called directly, without a job. It drops all reports."""

    canceled = yielding = False

    def save_checkpoint(self, text: str) -> None:
        pass

    def progress(self, fraction: float) -> None:
        pass

    def spend(self, total: Money, amount: Money) -> None:
        pass

    def log_handler(self) -> None:
        return None


# Functions that take the context as their first argument


def takes_context(function: Callable[..., Any], names: Collection[str] = ()) -> bool:
    """Whether the first parameter is annotated JobContext, or has no annotation and one of these names."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C
        return False
    if not parameters:
        return False
    first = parameters[0]
    if first.annotation is inspect.Parameter.empty:
        return first.name.strip("_") in names
    return is_context(function, first)


def is_context(function: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    hint = annotation(function, parameter.name)
    return hint is JobContext or str(parameter.annotation).rpartition(".")[2] == JobContext.__name__


def annotation(function: Callable[..., Any], name: str) -> Any:
    """
    The annotation of one parameter. Each is evaluated alone: a name under TYPE_CHECKING must not spoil the
    others.
    """
    target = inspect.unwrap(function)
    annotations = getattr(target, "__annotations__", {})
    if name not in annotations:
        return inspect.Parameter.empty
    try:
        holder = SimpleNamespace(__annotations__={name: annotations[name]})
        scope = getattr(target, "__globals__", {})
        return typing.get_type_hints(holder, scope, include_extras=True)[name]
    except Exception:  # noqa: BLE001  # an annotation may be any expression
        return inspect.Parameter.empty


# Values of job functions: results, checkpoints, arguments


def json_of(value: Any, what: str = "the result") -> str:
    """
    A value of user code as JSON: all that msgspec encodes (dataclasses, datetimes, UUIDs, Structs, enums),
    and paths. A worker of the runner tries plain JSON first and imports msgspec only if that fails, because
    most functions never need it. Raises TypeError, ValueError or OverflowError if JSON cannot represent the
    value.
    """
    if "msgspec" not in sys.modules:
        try:
            return json_text(value, what)
        except TypeError:
            try:
                import msgspec  # noqa: PLC0415  # see above
            except ImportError:
                msgspec = None  # type: ignore[assignment]  # not installed for this Python
            if msgspec is None:
                raise
    return checked_json(lambda: encode(value), lambda: _builtins(value), what).decode()


def encode(value: Any) -> bytes:
    import msgspec  # noqa: PLC0415  # see above

    return msgspec.json.encode(value, enc_hook=_path_text)


def _builtins(value: Any) -> Any:
    import msgspec  # noqa: PLC0415  # see above

    return msgspec.to_builtins(value, enc_hook=_path_text)


def _path_text(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"{type(value).__qualname__} cannot be written as JSON")


def from_text(kind: type, value: Any) -> Any:
    """A hook for msgspec's decoders: makes a path from its text."""
    if issubclass(kind, PurePath):
        if not isinstance(value, str):
            raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
        return kind(value)
    raise NotImplementedError(f"{kind.__qualname__} cannot be made from JSON")
