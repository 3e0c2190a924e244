"""The terms of `parallel_limit` and its sync twin: what both check at the call, and the outcome both can yield.

The work behind `parallel_limit`: up to n tasks over one shared iterator.

A task for every item would cost three times as much. There are n places; an item holds one from the moment it is
pulled until the loop takes its result, so that a slow loop holds back the pullers and, through them, the source. A
puller that finds no place free ends; the loop, when it frees one, asks for another.

One thing bends that rule, because to wait for it would double the cost of short calls: between the moment the loop is
woken for a result and the moment it runs, further results hold no place, as it is about to take them. If it then takes
that one and turns to something else, the others lie beside n calls in progress. So n is the limit of calls, and of
calls and results together as long as they end one by one; when many end in the same turn of the event loop, 2n is. In
input order, a result that has to wait for an earlier one always holds its place, which bounds the line behind a slow
head.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import types
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from inspect import isawaitable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, TypeVar, get_args

from penstock.core.text import is_kind, safe_repr, type_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

__all__ = ["OnError", "Pullers", "Settled", "checked_errors", "checked_fn", "checked_n", "log", "raisable"]

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


class Pullers:
    """What the pullers share with the loop that takes their results; all of it on the event loop's thread."""

    __slots__ = (
        "__weakref__",
        "awake",
        "batch",
        "context",
        "error",
        "errors",
        "exhausted",
        "fn",
        "is_async",
        "line",
        "loop",
        "n",
        "nudged",
        "piled",
        "results",
        "single",
        "skipped",
        "source",
        "spare",
        "started",
        "stopped",
        "tasks",
        "waiter",
    )

    loop: asyncio.AbstractEventLoop
    context: Context

    def __init__(
        self, source: Any, *, is_async: bool, n: int, fn: Callable[[Any], Any], ordered: bool, errors: OnError
    ) -> None:
        self.source = source
        self.is_async = is_async
        self.n = n
        self.fn = fn
        self.errors = errors
        self.results: deque[Any] = deque()
        # In input order: a slot for every item on its way to `results`, empty until its call has ended.
        self.line: deque[list[Any]] | None = deque() if ordered else None
        self.piled = 0  # slots that are filled and wait for one before them
        # Places that neither a puller nor a piled result holds. `results` may be as long as this.
        self.spare = n
        # A set that keeps its order, so that a cancellation can be replayed.
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.batch = _FIRST_BATCH
        self.waiter: asyncio.Future[None] | None = None  # the loop, waiting for a result
        self.awake = False  # the loop has been woken and has not run yet
        self.nudged = False
        self.single = False  # one puller is enough for now
        self.started = False
        self.exhausted = False  # no more items will be pulled
        self.stopped = False  # no more results will be taken in
        self.error: BaseException | None = None
        self.skipped = 0

    async def more(self) -> None:
        """Return with something in `results`, or end the loop."""
        while not self.results:
            if self.waiter is not None:
                raise RuntimeError("another task waits for the next result already: one flow, one loop")
            if self.exhausted and not self.tasks:
                await self.finish()
            if not self.started:
                self.start()
                continue  # tasks that start eagerly may have brought results already
            self.waiter = self.loop.create_future()
            try:
                await self.waiter
            except asyncio.CancelledError:
                await self.end()
                await self.close_source(quietly=True)
                raise
            finally:
                self.waiter = None
                self.awake = False

    def start(self) -> None:
        self.started = True
        self.loop = asyncio.get_running_loop()
        self.context = copy_context()
        self.staff()

    def nudge(self) -> None:
        """
        There may be room for another puller: look once those on their way have had their turn. Calls that never
        suspend are all made by one puller, and n - 1 more that find nothing left would be most of their cost.
        """
        if not self.nudged and not self.exhausted:
            self.nudged = True
            self.loop.call_soon(self.staff)

    def staff(self) -> None:
        """
        Twice as many each time: three items with n = 10,000 shall not cost 10,000 tasks, nor a long source 10,000
        turns of the loop.
        """
        self.nudged = False
        room = self.spare - len(self.results)
        if self.exhausted or self.single or room <= 0:
            return
        hired = min(room, self.batch)
        self.batch *= 2
        _AT_WORK.add(self)
        for _ in range(hired):
            self.spare -= 1
            task = self.context.run(self.loop.create_task, self.work(), name="parallel_limit")
            self.tasks[task] = None
            task.add_done_callback(self.left)
        if hired < room:
            self.nudge()

    async def work(self) -> None:  # noqa: C901, PLR0912  # each part taken out costs every item a call, 50 ns
        """A puller, and the way of an item."""
        fn, source, results, line, context = self.fn, self.source, self.results, self.line, self.context
        settled = self.errors == "settled"
        slot: list[Any] | None = None
        before, since = -1, 0.0
        while True:
            if len(results) > self.spare and not (self.awake and len(results) <= self.n):
                await self.step_aside()
                if len(results) > self.spare:
                    return
            if self.exhausted or self.single:
                self.batch = 1
                return
            try:
                item = await self.pull() if self.is_async else next(source, _END)
            except Exception as error:  # noqa: BLE001  # the source is the caller's and may raise anything
                self.source_failed(error)
                return
            if item is _END:
                self.exhausted = True
                return
            if line is not None:
                slot = []
                line.append(slot)
            try:
                value = fn(item)
                if type(value) is _Coroutine or isawaitable(value):
                    value = await value
                elif isinstance(value, Future):
                    value = await asyncio.wrap_future(value)
                if settled:
                    value = Settled(item, value)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # whatever it raises is an outcome
                value = self.outcome_of(item, error)
            if self.stopped:
                return
            # Nobody has been here since: the call has not suspended, most likely.
            alone = len(results) == before
            if slot is not None:
                self.line_up(slot, value)
            elif value is not _SKIPPED:
                results.append(value)
            if self.waiter is not None and results:
                self.wake()
            item = value = slot = None  # a payload must not live on while this puller waits for its next
            try:
                if copy_context() != context:
                    return  # the call has set a variable: the next one gets a new task, with the context as it was
            except Exception:  # noqa: BLE001  # values that refuse to be compared, so new ones
                return
            if not alone:
                since = 0.0
            elif not since:
                since = monotonic()
            elif monotonic() - since > _SLICE:
                await self.breathe()
                since = monotonic()
            before = len(results)

    async def step_aside(self) -> None:
        """
        Leave the place to somebody who can use it, for one turn of the loop. Nearly always the loop has taken results
        by then, and a turn costs a fraction of ending and a new task.
        """
        self.spare += 1
        await _turn()
        self.spare -= 1

    async def pull(self) -> Any:
        """From an async source, one puller at a time, as async generators demand."""
        item = await self.singly(anext(self.source, _END))
        return _END if self.stopped else item  # the source may have swallowed our cancellation

    async def breathe(self) -> None:
        """
        Let others use the event loop: these calls do not suspend. So one puller makes as many of them as n pullers
        would, and n would take n times as long before anybody else has a turn.
        """
        if self.single:
            await _turn()
        else:
            await self.singly(_turn())

    async def singly(self, step: Awaitable[Any]) -> Any:
        """While this goes on one puller is enough. Others that come by end; more are called for afterwards."""
        self.single = True
        outcome = await step
        self.single = False
        if self.spare > len(self.results):
            self.nudge()
        return outcome

    def outcome_of(self, item: Any, error: BaseException) -> Any:
        if self.stopped:
            if not is_kind(error, asyncio.CancelledError):
                log.debug("a call failed after its flow had been stopped", exc_info=error)
        elif self.errors == "raise" or (is_kind(error, asyncio.CancelledError) and _being_canceled()):
            self.fail(error)
        elif self.errors == "settled":
            return Settled(item, None, error)
        else:
            self.skipped += 1
            log.debug("skipped %s", safe_repr(item), exc_info=error)
        return _SKIPPED

    def line_up(self, slot: list[Any], value: Any) -> None:
        line = self.line
        assert line is not None
        slot.append(value)
        self.piled += 1
        self.spare -= 1
        while line and line[0]:
            head = line.popleft()[0]
            self.piled -= 1
            self.spare += 1
            if head is not _SKIPPED:
                self.results.append(head)
        if self.piled:
            self.awake = False  # the loop cannot take what is piled: places count again
        if self.spare > len(self.results):
            self.nudge()

    def wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
            self.awake = True

    def source_failed(self, error: BaseException) -> None:
        if self.errors == "raise":
            self.fail(error)
        elif not self.exhausted:
            self.exhausted = True
            self.error = error

    def fail(self, error: BaseException) -> None:
        if not self.stopped:
            self.error = error
            self.stop()

    def stop(self) -> None:
        """Cancels once: a second cancellation would break into the clean-up that the first one has begun."""
        if not self.stopped:
            self.stopped = self.exhausted = True
            self.cancel()

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    def left(self, task: asyncio.Task[None]) -> None:
        """
        Called for every puller that ends, even one cancelled before its first step, where no `finally` of its own
        would run. What escapes a puller (KeyboardInterrupt, a cancellation from outside) ends the whole flow.
        """
        del self.tasks[task]
        self.spare += 1
        if task.cancelled():
            self.fail(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.fail(error)
        if not self.tasks:
            _AT_WORK.discard(self)
            if self.exhausted:
                self.wake()
        if self.spare > len(self.results):
            self.nudge()

    async def finish(self) -> NoReturn:
        error, self.error = self.error, None
        if error is None:
            raise StopAsyncIteration
        await self.close_source(quietly=True)
        try:
            raise raisable(error)
        finally:
            del error  # its traceback holds this frame: together they would wait for the garbage collector

    async def end(self) -> None:
        """Stop, and stay until the last puller has ended, however often the loop itself is cancelled meanwhile."""
        if asyncio.current_task() in self.tasks:
            raise RuntimeError("a call cannot close the flow that it is part of: it would wait for itself")
        self.stop()
        self.results.clear()
        self.error = None
        canceled: asyncio.CancelledError | None = None
        while self.tasks:
            try:
                await asyncio.wait(set(self.tasks))
            except asyncio.CancelledError as again:
                canceled = again
                self.cancel()
        if canceled is not None:
            await self.close_source(quietly=True)
            raise canceled

    async def close_source(self, *, quietly: bool = False) -> None:
        source, self.source = self.source, None
        aclose = getattr(source, "aclose", None) if self.is_async else None
        if aclose is None:
            return
        try:
            await aclose()
        except Exception as error:  # the source is the caller's and may raise anything
            if not quietly:
                raise
            log.debug("closing the items failed", exc_info=error)

    def abandon(self) -> None:
        """Nobody will take results any more. The garbage collector may find out on any thread, and late."""
        if not self.tasks or self.loop.is_closed():
            return
        self.results.clear()
        try:
            here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            here = False
        if here:
            self.stop()
        else:
            with suppress(RuntimeError):  # closed since
                self.loop.call_soon_threadsafe(self.stop)


_Coroutine: Final = types.CoroutineType
_END: Final = object()
_SKIPPED: Final = object()
_FIRST_BATCH: Final = 8
_SLICE: Final = 0.001  # seconds for which calls that never suspend may keep everybody else off the event loop
#: The event loop knows tasks only weakly, and nobody else an abandoned flow's.
_AT_WORK: Final[set[Pullers]] = set()


@types.coroutine
def _turn() -> Generator[None, None, None]:
    yield


def _being_canceled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
