"""
`JobFunction`: a function that is also a job, and its arguments and result as JSON.

Call it as before, or enqueue its call; both are typed alike. Enqueueing makes an intent of the arguments,
submits it, and returns a handle when the job is on disk.

Arguments travel as JSON by the function's annotations, never as pickle: a file that other users may write
must not be able to run code. An argument that does not come back from JSON equal to what was given is refused
by its name when it is enqueued; at run time it would be a failure far from its cause.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, Unpack

import msgspec
from msgspec.structs import replace

from penstock.core.errors import BadArgument, BadIntent, KeyConflict
from penstock.core.jobs.arrays import array_of
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import JobId
from penstock.core.text import safe_repr
from penstock.library.arrays import ArrayHandle
from penstock.library.handle import JobHandle
from penstock.library.options import JobOptions, Options
from penstock.stores.api import Receipt
from penstock.work.context import (
    JobContext,
    JobFacts,
    NoChannel,
    annotation,
    encode,
    from_text,
    is_context,
)
from penstock.work.outcome import CurrentJob, current_job_or_none

if TYPE_CHECKING:
    from penstock.library.scheduler import Scheduler


#: Where a worker process finds a function: its module, and the path inside it.
Place: TypeAlias = tuple[str, str]


def place_of(fn: Any) -> Place:
    if "<" in fn.__qualname__:
        raise ValueError(
            f"{fn.__qualname__} is defined inside a function, or is a lambda: no worker process can find it by name; "
            'define it at the top of a module, or use kind="thread"'
        )
    return fn.__module__, fn.__qualname__


P = ParamSpec("P")
R = TypeVar("R")
#: What calling it directly gives: R, or a coroutine of R.
C = TypeVar("C")
Submit: TypeAlias = Callable[[Sequence[Intent]], list[Receipt]]


class JobFunction(Generic[P, C, R]):
    """
    A function that can be enqueued: what `@scheduler.job` makes. Typed like the function.

    For example:

        @scheduler.job(retries=(60, 300))
        def index(path: str) -> int:
            return len(path)

        job = index.options(priority="HIGH").enqueue("/data")
        index("/data")  # still a function
    """

    def __init__(
        self, scheduler: Scheduler, fn: Callable[..., C], options: JobOptions, arguments: Arguments
    ) -> None:
        functools.update_wrapper(self, fn)
        self.scheduler, self.fn, self.arguments = scheduler, fn, arguments
        self._options = options
        self._intents = options.intents()
        self.is_async = inspect.iscoroutinefunction(fn)

    @property
    def name(self) -> str:
        """The job's type in the queue. A program that opens the same file and registers this name can run the job."""
        return self._options.like.job_type

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        """Now, here, without the scheduler."""
        if self.arguments.wants_context:
            return self.fn(current_job_or_none() or self._detached(), *args, **kwargs)
        return self.fn(*args, **kwargs)

    def _detached(self) -> JobContext:
        return JobContext(JobFacts("", self.name), NoChannel())

    def invoke(self, job: CurrentJob) -> C:
        """For a job, with the arguments of its payload."""
        args, kwargs = self.arguments.decode(job.facts.payload)
        if self.arguments.wants_context:
            return self.fn(job.context, *args, **kwargs)
        return self.fn(*args, **kwargs)

    def options(self, **given: Unpack[Options]) -> JobFunction[P, C, R]:
        """The same job with other options, for the calls enqueued through what this returns."""
        options = self._options.take(dict(given))
        self.scheduler.check_options(options)
        return JobFunction(self.scheduler, self.fn, options, self.arguments)

    def within(self, connection: Any) -> Within[P, R]:
        """
        To enqueue as part of a transaction of yours: the jobs are there when it commits and never were when it rolls back. `connection`:
        a psycopg Connection, or a SQLAlchemy Session or Connection on psycopg, to the database that the scheduler is in.
        """
        return Within(self, connection)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """On disk when it returns."""
        return self.enqueue_by(self._submit, args, kwargs)

    def enqueue_by(self, submit: Submit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobHandle[R]:
        intent = self._intent(args, kwargs)
        try:
            [receipt] = submit([intent])
        except KeyConflict as conflict:
            return self._first(conflict, intent)
        return self._handle(receipt)

    async def enqueue_async(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """The same for an event loop, which goes on while the disk writes."""
        intent = self._intent(args, kwargs)
        try:
            [receipt] = await self.scheduler.submit_async([intent], self._options.wait_for_space)
        except KeyConflict as conflict:
            return self._first(conflict, intent)
        return self._handle(receipt)

    def enqueue_many(self, calls: Iterable[Any]) -> list[JobHandle[R]]:
        """
        All of them or none, in one transaction. Each item is the arguments of one call: a tuple of them, a dict by name, or the
        argument itself where there is one (a tuple or a dict as the one argument is written `((1, 2),)`).
        """
        return self.enqueue_many_by(self._submit, calls)

    def enqueue_array(
        self, indices: Iterable[int], *args: Any, at_once: int | None = None, **kwargs: Any
    ) -> ArrayHandle[R]:
        """
        One call for each index, at most `at_once` of them at once; the function reads its own as
        `penstock.current_job().array_index`. One row on disk, however many indices. A unique key is that of the whole array.
        """
        try:
            spec = array_of(indices, at_once)
        except ValueError as error:
            raise BadIntent.of(("array", str(error))) from None
        intent = self._intent(args, kwargs)
        record, created = self.scheduler.array_service.submit(intent, spec, self.scheduler.principal)
        return ArrayHandle(self.scheduler, record.array.array_id, self.arguments, created=created)

    def enqueue_many_by(self, submit: Submit, calls: Iterable[Any]) -> list[JobHandle[R]]:
        intents = [self._intent(*_call(item)) for item in calls]
        return [self._handle(receipt) for receipt in submit(intents)] if intents else []

    def request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Intent:
        """The intent of a call, for a batch."""
        return self._intent(args, kwargs)

    def requests(self, calls: Iterable[Any]) -> list[Intent]:
        """The intents of calls as `enqueue_many` takes them."""
        return [self._intent(*_call(item)) for item in calls]

    def handle(self, receipt: Receipt) -> JobHandle[R]:
        return self._handle(receipt)

    def _submit(self, intents: Sequence[Intent]) -> list[Receipt]:
        return self.scheduler.submit(intents, self._options.wait_for_space)

    def _intent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Intent:
        payload = self.arguments.encode(args, kwargs)
        if self._intents is not None:
            return self._intents(payload)
        return self._options.intent(payload, self.scheduler.store.now(), args, kwargs)

    def template(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Intent:
        """The intent of such a call, for a schedule: without a key and without times, which each of its jobs has of its own."""
        if self._options.deadline is not None or self._options.not_before is not None:
            raise ValueError(
                f"{self.name} has a deadline or a not_before: a scheduled job cannot; use .options(deadline=None, not_before=None)"
            )
        return replace(self._options.like, payload=self.arguments.encode(args, kwargs))

    def _first(self, conflict: KeyConflict, intent: Intent) -> JobHandle[R]:
        """The same call under other times or another priority is still the job that was asked for."""
        job_id = conflict.data.get("job_id")
        first = None if job_id is None else self.scheduler.store.job(job_id)
        if first is None or (first.intent.job_type, first.intent.payload) != (
            intent.job_type,
            intent.payload,
        ):
            raise conflict
        return self._handle(Receipt(first.job_id, first.state, created=False))

    def _handle(self, receipt: Receipt) -> JobHandle[R]:
        return JobHandle(
            self.scheduler,
            JobId(receipt.job_id),
            self.arguments,
            created=receipt.created,
            deadline_reachable=receipt.deadline_reachable,
        )

    def __repr__(self) -> str:
        return f"<job {self.name} on {self.scheduler.where}>"


class Within(Generic[P, R]):
    """A job's function on its way into a transaction of the caller's. What is returned stands for a job that others see after the commit."""

    def __init__(self, function: JobFunction[P, Any, R], connection: Any) -> None:
        self._function, self._connection = function, connection

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        return self._function.enqueue_by(self._submit, args, kwargs)

    def enqueue_many(self, calls: Iterable[Any]) -> list[JobHandle[R]]:
        return self._function.enqueue_many_by(self._submit, calls)

    def _submit(self, intents: Sequence[Intent]) -> list[Receipt]:
        return self._function.scheduler.job_service.submit_within(self._connection, intents)


def _call(item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match item:
        case tuple():
            return item, {}
        case dict():
            if not all(isinstance(name, str) for name in item):
                raise BadArgument("a dict in enqueue_many is the arguments of a call by name", argument=None)
            return (), item
        case _:
            return (item,), {}


Kinds: Final = inspect.Parameter


class Arguments:
    """Annotations are looked at on first use, when every name they mention exists."""

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self._fn, self._name = fn, name
        signature = inspect.signature(fn)
        given = list(signature.parameters.values())
        self.wants_context = bool(given) and is_context(fn, given[0])
        for parameter in given[1:]:
            if is_context(fn, parameter):
                raise TypeError(
                    f"{name}: the JobContext must be the first parameter, {parameter.name!r} is not; "
                    "or ask penstock.current_job() inside the function"
                )
        self._signature = signature.replace(parameters=given[self.wants_context :])
        self._parameters = [(p.name, p.kind) for p in given[self.wants_context :]]
        #: How many arguments by position are all there are; None, where some can be given only in another way.
        in_order = all(
            kind in (Kinds.POSITIONAL_ONLY, Kinds.POSITIONAL_OR_KEYWORD) for _, kind in self._parameters
        )
        self._plain = len(self._parameters) if in_order else None
        self._decoder: msgspec.json.Decoder[Any] | None = None
        self._returns: msgspec.json.Decoder[Any] | None = None

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        bound = self._bound(args, kwargs)
        decoder = self._decoder or self._ready()
        try:
            blob = encode(bound)
            back = decoder.decode(blob)
        except Exception:  # noqa: BLE001  # a foreign type may raise anything; which argument it was is asked below
            raise self._refusal(bound) from None
        for name, value in bound.items():
            if not _same(value, getattr(back, name)):
                raise self._refusal({name: value})
        return blob.decode()

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if not kwargs and len(args) == self._plain:  # the plain case, at a tenth of what `bind` costs
            return dict(zip(self._signature.parameters, args, strict=True))
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise BadArgument(f"{self._name}: {error}", job=self._name, argument=None) from None

    def decode(self, payload: str) -> tuple[list[Any], dict[str, Any]]:
        """Raises msgspec.ValidationError when the function has changed since, and no longer takes what was written."""
        back = (self._decoder or self._ready()).decode(payload)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_name = False
        for name, kind in self._parameters:
            value = getattr(back, name)
            if value is msgspec.UNSET:
                by_name = kind is not Kinds.VAR_POSITIONAL  # it has a default, or the call will say
            elif kind is Kinds.VAR_POSITIONAL:
                args += value
            elif kind is Kinds.VAR_KEYWORD:
                kwargs |= value
            elif by_name or kind is Kinds.KEYWORD_ONLY:
                kwargs[name] = value
            else:
                args.append(value)
        return args, kwargs

    def result(self, text: str | None) -> Any:
        if text is None:
            return None
        if self._returns is None:
            returns = annotation(self._fn, "return")
            self._returns = _decoder(Any if returns is inspect.Signature.empty else returns)
        try:
            return self._returns.decode(text)
        except (msgspec.ValidationError, NotImplementedError):
            return json.loads(text)  # it returned something else than it says; the caller gets what there is

    def _ready(self) -> msgspec.json.Decoder[Any]:
        fields = []
        for parameter in self._signature.parameters.values():
            hint = _carried(annotation(self._fn, parameter.name))
            if parameter.kind is Kinds.VAR_POSITIONAL:
                hint = GenericAlias(tuple, (hint, ...))
            elif parameter.kind is Kinds.VAR_KEYWORD:
                hint = GenericAlias(dict, (str, hint))
            fields.append(
                (parameter.name, hint | msgspec.UnsetType if hint is not Any else Any, msgspec.UNSET)
            )
        shape = msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True, kw_only=True)
        self._decoder = msgspec.json.Decoder(shape, dec_hook=from_text)
        return self._decoder

    def _refusal(self, bound: Mapping[str, Any]) -> BadArgument:
        for name, value in bound.items():
            why = self._problem(name, value)
            if why:
                return BadArgument(f"{self._name}: argument {name!r} {why}", job=self._name, argument=name)
        return BadArgument(
            f"{self._name}: its arguments cannot be written as JSON", job=self._name, argument=None
        )

    def _problem(self, name: str, value: Any) -> str:
        kind = type(value).__qualname__
        hint = annotation(self._fn, name)
        try:
            blob = encode({name: value})
        except Exception:  # noqa: BLE001  # as above
            return f"is a {kind}, which JSON cannot carry; pass what it can be made from (an id, a path)"
        try:
            back = getattr((self._decoder or self._ready()).decode(blob), name)
        except msgspec.ValidationError as error:
            return f"is {_short(value)} and does not fit its annotation: {error}"
        except Exception:  # noqa: BLE001  # as above
            return f"is a {kind}, which cannot be made again from JSON; pass what it can be made from"
        if _same(value, back):
            return ""
        came = f"would come back as {_short(back)}, not as the {kind} that it is"
        return came if _annotated(hint) else f"{came}; annotate the parameter with its type"


def _decoder(hint: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_carried(hint), dec_hook=from_text)


def _carried(hint: Any) -> Any:
    """The annotation where msgspec can read by it, else Any: the comparison at enqueue then refuses what is lost."""
    if not _annotated(hint):
        return Any
    try:
        msgspec.json.Decoder(hint | msgspec.UnsetType, dec_hook=from_text)
    except Exception:  # noqa: BLE001  # type variables, unions of classes, what is only a name to the type checker
        return Any
    return hint


def _annotated(hint: Any) -> bool:
    return hint is not inspect.Parameter.empty and hint is not Any


def _same(value: Any, back: Any) -> bool:
    try:
        return bool(value == back) and isinstance(back, bool) == isinstance(value, bool)
    except Exception:  # noqa: BLE001  # an array's comparison has no truth
        return False


def _short(value: Any, most: int = 60) -> str:
    text = safe_repr(value)
    return text if len(text) <= most else text[:most] + "..."
