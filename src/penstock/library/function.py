"""
`JobFunction`: a function that is also a job, and its arguments and result as JSON.

A program calls it as before, or enqueues the call; both are typed alike. `enqueue` makes an intent of the
arguments, submits it, and returns a handle when the job is on disk.

Arguments are stored as JSON by the function's annotations, and not as pickle: a file that other users may
write must not be able to run code. An argument that would not come back from JSON equal is refused by name at
`enqueue`, so that the error is near its cause.
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
ImportPath: TypeAlias = tuple[str, str]


def import_path_of(fn: Any) -> ImportPath:
    """The import path of a function. ValueError: a worker process could not import it."""
    if "<" in fn.__qualname__:
        raise ValueError(
            f"{fn.__qualname__} is defined inside a function, or is a lambda: no worker process can find it by name; "
            'define it at the top of a module, or use kind="thread"'
        )
    return fn.__module__, fn.__qualname__


P = ParamSpec("P")
R = TypeVar("R")
#: What a direct call returns: R, or a coroutine of R.
C = TypeVar("C")
Submit: TypeAlias = Callable[[Sequence[Intent]], list[Receipt]]


class JobFunction(Generic[P, C, R]):
    """
    A function that can also be enqueued; `@scheduler.job` makes it. It is typed like the function.

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
        """The job's type. Any program that opens the same store and registers this name can run its jobs."""
        return self._options.template.job_type

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        """Call the function directly, without the scheduler."""
        if self.arguments.wants_context:
            return self.fn(current_job_or_none() or self._detached(), *args, **kwargs)
        return self.fn(*args, **kwargs)

    def _detached(self) -> JobContext:
        return JobContext(JobFacts("", self.name), NoChannel())

    def invoke(self, job: CurrentJob) -> C:
        """Call the function for a job, with the arguments of its payload."""
        args, kwargs = self.arguments.decode(job.facts.payload)
        if self.arguments.wants_context:
            return self.fn(job.context, *args, **kwargs)
        return self.fn(*args, **kwargs)

    def options(self, **given: Unpack[Options]) -> JobFunction[P, C, R]:
        """The same function with other options. Calls that are enqueued on the result have them."""
        options = self._options.take(dict(given))
        self.scheduler.check_options(options)
        return JobFunction(self.scheduler, self.fn, options, self.arguments)

    def within(self, connection: Any) -> Within[P, R]:
        """
        Enqueue in your own transaction: the jobs exist when it commits, and never existed if it rolls back.
        `connection`: a psycopg Connection, or a SQLAlchemy Session or Connection on psycopg, to the
        scheduler's database.
        """
        return Within(self, connection)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Enqueue a call. The job is on disk when this returns."""
        return self.enqueue_by(self._submit, args, kwargs)

    def enqueue_by(self, submit: Submit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobHandle[R]:
        intent = self._intent(args, kwargs)
        try:
            [receipt] = submit([intent])
        except KeyConflict as conflict:
            return self._first(conflict, intent)
        return self._handle(receipt)

    async def enqueue_async(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """`enqueue` for an event loop, which continues while the disk writes."""
        intent = self._intent(args, kwargs)
        try:
            [receipt] = await self.scheduler.submit_async([intent], self._options.wait_for_space)
        except KeyConflict as conflict:
            return self._first(conflict, intent)
        return self._handle(receipt)

    def enqueue_many(self, calls: Iterable[Any]) -> list[JobHandle[R]]:
        """
        Enqueue all calls or none, in one transaction. Each item has the arguments of one call: a tuple of
        arguments, a dict by name, or a single argument. A single argument that is a tuple or a dict is
        written `((1, 2),)`.
        """
        return self.enqueue_many_by(self._submit, calls)

    def enqueue_array(
        self, indices: Iterable[int], *args: Any, at_once: int | None = None, **kwargs: Any
    ) -> ArrayHandle[R]:
        """
        Enqueue one call for each index, of which at most `at_once` run at once. The function gets its index
        by `penstock.current_job().array_index`. This writes one row, however many indices there are. A unique
        key is the key of the whole array.
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
        """The intents of calls, for a batch. `calls`: as for `enqueue_many`."""
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
        """
        The intent of a call, for a schedule: without a key and times, because each job of the schedule has
        its own.
        """
        if self._options.deadline is not None or self._options.not_before is not None:
            raise ValueError(
                f"{self.name} has a deadline or a not_before: a scheduled job cannot; use .options(deadline=None, not_before=None)"
            )
        return replace(self._options.template, payload=self.arguments.encode(args, kwargs))

    def _first(self, conflict: KeyConflict, intent: Intent) -> JobHandle[R]:
        """The job that has the key already, if it is the same call: times and priority may differ."""
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
    """
    A job function that enqueues in a transaction of the caller's. Other connections see the jobs after its
    commit.
    """

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
    """
    The parameters of a job function: makes JSON of arguments, and arguments of JSON. Annotations are read on
    first use, when all names in them exist.
    """

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
        #: The number of parameters if all can be given by position; else None.
        in_order = all(
            kind in (Kinds.POSITIONAL_ONLY, Kinds.POSITIONAL_OR_KEYWORD) for _, kind in self._parameters
        )
        self._plain = len(self._parameters) if in_order else None
        self._decoder: msgspec.json.Decoder[Any] | None = None
        self._returns: msgspec.json.Decoder[Any] | None = None

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The arguments as JSON. BadArgument: one of them would not come back equal."""
        bound = self._bound(args, kwargs)
        decoder = self._decoder or self._ready()
        try:
            blob = encode(bound)
            back = decoder.decode(blob)
        except Exception:  # noqa: BLE001  # a foreign type may raise anything; `_refusal` finds the argument
            raise self._refusal(bound) from None
        for name, value in bound.items():
            if not _same(value, getattr(back, name)):
                raise self._refusal({name: value})
        return blob.decode()

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if not kwargs and len(args) == self._plain:  # the usual case, in a tenth of the time of `bind`
            return dict(zip(self._signature.parameters, args, strict=True))
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise BadArgument(f"{self._name}: {error}", job=self._name, argument=None) from None

    def decode(self, payload: str) -> tuple[list[Any], dict[str, Any]]:
        """
        The arguments of a payload. msgspec.ValidationError: the function has changed and does not take them.
        """
        back = (self._decoder or self._ready()).decode(payload)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_name = False
        for name, kind in self._parameters:
            value = getattr(back, name)
            if value is msgspec.UNSET:
                by_name = kind is not Kinds.VAR_POSITIONAL  # without a default the call raises
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
        """The function's result from its JSON, by the annotation."""
        if text is None:
            return None
        if self._returns is None:
            returns = annotation(self._fn, "return")
            self._returns = _decoder(Any if returns is inspect.Signature.empty else returns)
        try:
            return self._returns.decode(text)
        except (msgspec.ValidationError, NotImplementedError):
            return json.loads(text)  # the function returned something else than its annotation

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
    """
    The annotation if msgspec can decode by it, else Any: `encode` then refuses values that JSON changes.
    """
    if not _annotated(hint):
        return Any
    try:
        msgspec.json.Decoder(hint | msgspec.UnsetType, dec_hook=from_text)
    except Exception:  # noqa: BLE001  # type variables, unions of classes, names that only type checkers know
        return Any
    return hint


def _annotated(hint: Any) -> bool:
    return hint is not inspect.Parameter.empty and hint is not Any


def _same(value: Any, back: Any) -> bool:
    try:
        return bool(value == back) and isinstance(back, bool) == isinstance(value, bool)
    except Exception:  # noqa: BLE001  # the comparison of arrays has no truth value
        return False


def _short(value: Any, most: int = 60) -> str:
    text = safe_repr(value)
    return text if len(text) <= most else text[:most] + "..."
