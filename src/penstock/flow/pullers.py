"""
The implementation of `parallel_limit`: up to n tasks, called pullers, over one shared iterator; and the
checks and outcomes that it shares with `parallel_limit_sync`.

(One task per item would cost three times as much.) There are n places. An item occupies one from the moment
it is pulled until the loop takes its result, so a slow loop slows down the pullers and the source. A puller
that finds no free place ends; when the loop frees a place, it adds a puller.

There is one exception, because waiting for the loop would double the cost of short calls: after the loop was
woken for a result and until it runs, further results occupy no place, because the loop is about to take them.
So n limits the calls in progress. It also limits calls and results together while calls end one by one; if
many end in the same turn of the event loop, that limit is 2n. With `ordered=True` a result that waits for an
earlier one always occupies its place, which bounds the results behind a slow first call.
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
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, NoReturn, TypeVar, get_args

from penstock.core.text import is_kind, safe_repr, type_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator


T_co = TypeVar("T_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)

OnError = Literal["raise", "skip", "settled"]

log = logging.getLogger("penstock.flow")


class Settled(Generic[T_co, R_co]):
    """
    How the call for one item ended: `Returned` with a value, or `Raised` with an error. `ok` says which.
    Type checkers follow `ok is True`, `error is None` and `match`; mypy also follows a plain `if outcome.ok:`.
    Pyright narrows no union by the truth of an attribute.

        async for outcome in penstock.parallel_limit(urls, 8, fetch, errors="settled"):
            if outcome.ok is True:
                save(outcome.item, outcome.value)  # the type that `fetch` returns
            else:
                print(outcome.item, outcome.error)  # an exception
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def item(self) -> T_co: ...
        @property
        def ok(self) -> bool: ...
        @property
        def value(self) -> R_co | None: ...
        @property
        def error(self) -> BaseException | None: ...

    def result(self) -> R_co:
        """The value with its exact type; raises the error if there is one, as `Future.result` does."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Returned(Settled[T_co, R_co]):
    """
    The call for `item` returned `value`: one of the two kinds of `Settled`.

    For example:

        for outcome in penstock.parallel_limit_sync(urls, 8, fetch, errors="settled"):
            match outcome:
                case penstock.Returned(item=url, value=page):
                    print(url, len(page))
    """

    item: T_co
    value: R_co
    error: ClassVar[None] = None
    ok: ClassVar[Literal[True]] = True

    def result(self) -> R_co:
        """The value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Raised(Settled[T_co, NoReturn]):
    """
    The call for `item` raised `error`: one of the two kinds of `Settled`.

    For example:

        for outcome in penstock.parallel_limit_sync(urls, 8, fetch, errors="settled"):
            match outcome:
                case penstock.Raised(item=url, error=error):
                    print(url, error)
    """

    item: T_co
    error: BaseException
    value: ClassVar[None] = None
    ok: ClassVar[Literal[False]] = False

    def result(self) -> NoReturn:
        """Raises the error."""
        raise self.error


#: What a flow with `errors="settled"` yields.
Outcome = Returned[T_co, R_co] | Raised[T_co]


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
    return fn  # type: ignore[no-any-return]  # callable() gives no argument types


def checked_errors(errors: Any) -> OnError:
    if errors not in get_args(OnError):
        raise ValueError(f"errors must be 'raise', 'skip' or 'settled', not {errors!r}")
    return errors  # type: ignore[no-any-return]  # checked in the line above


def raisable(error: BaseException) -> BaseException:
    """
    The error in a form that an iterator can raise. StopIteration would end the iteration silently (PEP 479),
    so it is wrapped.
    """
    if not is_kind(error, (StopIteration, StopAsyncIteration)):
        return error
    wrapped = RuntimeError(f"a call raised {type_name(error)}")
    wrapped.__cause__ = error
    return wrapped


class Pullers:
    """
    The pullers of one flow, and the state that they share with the loop. Used only on the event loop's
    thread.
    """

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
        # In the order of the items: a slot for every item on its way to `results`, empty until its call has
        # ended.
        self.in_order: deque[list[Any]] | None = deque() if ordered else None
        self.held_back = 0  # filled slots that wait for an earlier one
        # Places that no puller and no held back result occupies. `results` may grow to this length.
        self.free_places = n
        # A dict as an ordered set, so that a cancellation can be replayed.
        self.tasks: dict[asyncio.Task[None], None] = {}
        self.batch = _FIRST_BATCH
        self.waiter: asyncio.Future[None] | None = None  # set while the loop waits for a result
        self.loop_woken = False  # the loop was woken and has not run yet
        self.adding = False
        self.one_is_enough = False  # one puller is enough for now
        self.started = False
        self.exhausted = False  # no more items will be pulled
        self.stopped = False  # no more results will be taken in
        self.error: BaseException | None = None
        self.skipped = 0

    async def more(self) -> None:
        """Return when `results` is not empty, or end the loop."""
        while not self.results:
            if self.waiter is not None:
                raise RuntimeError("another task waits for the next result already: one flow, one loop")
            if self.exhausted and not self.tasks:
                await self.finish()
            if not self.started:
                self.start()
                continue  # tasks that start eagerly may have produced results already
            self.waiter = self.loop.create_future()
            try:
                await self.waiter
            except asyncio.CancelledError:
                await self.end()
                await self.close_source(quietly=True)
                raise
            finally:
                self.waiter = None
                self.loop_woken = False

    def start(self) -> None:
        self.started = True
        self.loop = asyncio.get_running_loop()
        self.context = copy_context()
        self.add_pullers()

    def add_pullers_soon(self) -> None:
        """
        Add pullers in the next turn of the event loop. Not now: one puller makes all calls that never
        suspend, and n - 1 further pullers without items would be most of the cost.
        """
        if not self.adding and not self.exhausted:
            self.adding = True
            self.loop.call_soon(self.add_pullers)

    def add_pullers(self) -> None:
        """
        Add pullers, twice as many each time: three items with n = 10,000 must not cost 10,000 tasks, nor a
        long source 10,000 turns of the loop.
        """
        self.adding = False
        places = self.free_places - len(self.results)
        if self.exhausted or self.one_is_enough or places <= 0:
            return
        added = min(places, self.batch)
        self.batch *= 2
        _ACTIVE.add(self)
        for _ in range(added):
            self.free_places -= 1
            task = self.context.run(self.loop.create_task, self.pull_items(), name="parallel_limit")
            self.tasks[task] = None
            task.add_done_callback(self.puller_ended)
        if added < places:
            self.add_pullers_soon()

    async def pull_items(self) -> None:  # noqa: C901, PLR0912
        """
        The body of a puller: pull an item, call the function, deliver the result, repeat. One function for
        speed: each call taken out costs every item 50 ns.
        """
        fn, source, results, in_order, context = (
            self.fn,
            self.source,
            self.results,
            self.in_order,
            self.context,
        )
        settled = self.errors == "settled"
        slot: list[Any] | None = None
        before, since = -1, 0.0
        while True:
            if len(results) > self.free_places and not (self.loop_woken and len(results) <= self.n):
                await self.lend_place()
                if len(results) > self.free_places:
                    return
            if self.exhausted or self.one_is_enough:
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
            if in_order is not None:
                slot = []
                in_order.append(slot)
            try:
                value = fn(item)
                if type(value) is _Coroutine or isawaitable(value):
                    value = await value
                elif isinstance(value, Future):
                    value = await asyncio.wrap_future(value)
                if settled:
                    value = Returned(item, value)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # the outcome of this call
                value = self.outcome_of(item, error)
            if self.stopped:
                return
            # No other puller has added a result since: most likely the call has not suspended.
            alone = len(results) == before
            if slot is not None:
                self.put_in_order(slot, value)
            elif value is not _SKIPPED:
                results.append(value)
            if self.waiter is not None and results:
                self.wake()
            item = value = slot = None  # a payload must not live on while this puller waits for its next item
            try:
                # After a call that has set a context variable, a new task with the original context makes
                # the next call.
                if copy_context() != context:
                    return
            except Exception:  # noqa: BLE001  # values that cannot be compared: use a new task, too
                return
            if not alone:
                since = 0.0
            elif not since:
                since = monotonic()
            elif monotonic() - since > _TIME_SLICE:
                await self.let_others_run()
                since = monotonic()
            before = len(results)

    async def lend_place(self) -> None:
        """
        Free this puller's place for one turn of the loop. Nearly always the loop has taken results by then,
        and a turn costs a fraction of ending this task and making a new one.
        """
        self.free_places += 1
        await _one_loop_turn()
        self.free_places -= 1

    async def pull(self) -> Any:
        """Take the next item of an async source, one puller at a time, as async generators require."""
        item = await self.as_only_puller(anext(self.source, _END))
        return _END if self.stopped else item  # the source may have caught our cancellation

    async def let_others_run(self) -> None:
        """
        Let other tasks run, because these calls do not suspend. One puller makes as many such calls as n
        pullers, which would take n times as long before any other task runs.
        """
        if self.one_is_enough:
            await _one_loop_turn()
        else:
            await self.as_only_puller(_one_loop_turn())

    async def as_only_puller(self, step: Awaitable[Any]) -> Any:
        """
        Await this step with only this puller active: other pullers end, and new ones are added afterwards.
        """
        self.one_is_enough = True
        outcome = await step
        self.one_is_enough = False
        if self.free_places > len(self.results):
            self.add_pullers_soon()
        return outcome

    def outcome_of(self, item: Any, error: BaseException) -> Any:
        if self.stopped:
            if not is_kind(error, asyncio.CancelledError):
                log.debug("a call failed after its flow had been stopped", exc_info=error)
        elif self.errors == "raise" or (is_kind(error, asyncio.CancelledError) and _being_canceled()):
            self.fail(error)
        elif self.errors == "settled":
            return Raised(item, error)
        else:
            self.skipped += 1
            log.debug("skipped %s", safe_repr(item), exc_info=error)
        return _SKIPPED

    def put_in_order(self, slot: list[Any], value: Any) -> None:
        in_order = self.in_order
        assert in_order is not None
        slot.append(value)
        self.held_back += 1
        self.free_places -= 1
        while in_order and in_order[0]:
            head = in_order.popleft()[0]
            self.held_back -= 1
            self.free_places += 1
            if head is not _SKIPPED:
                self.results.append(head)
        if self.held_back:
            self.loop_woken = False  # the loop cannot take results that are held back: places count again
        if self.free_places > len(self.results):
            self.add_pullers_soon()

    def wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
            self.loop_woken = True

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
        """
        Stop pulling and cancel the pullers, once: a second cancellation would interrupt the clean-up that the
        first one started.
        """
        if not self.stopped:
            self.stopped = self.exhausted = True
            self.cancel()

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    def puller_ended(self, task: asyncio.Task[None]) -> None:
        """
        Called for every puller that ends, even one canceled before its first step, where no `finally` of its
        own would run. An exception that escapes a puller (KeyboardInterrupt, a cancellation from outside)
        ends the whole flow.
        """
        del self.tasks[task]
        self.free_places += 1
        if task.cancelled():
            self.fail(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.fail(error)
        if not self.tasks:
            _ACTIVE.discard(self)
            if self.exhausted:
                self.wake()
        if self.free_places > len(self.results):
            self.add_pullers_soon()

    async def finish(self) -> NoReturn:
        error, self.error = self.error, None
        if error is None:
            raise StopAsyncIteration
        await self.close_source(quietly=True)
        try:
            raise raisable(error)
        finally:
            del error  # its traceback holds this frame: the cycle would wait for the garbage collector

    async def end(self) -> None:
        """
        Stop, and wait until the last puller has ended, however often the loop itself is canceled meanwhile.
        """
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
        """
        Stop the pullers of a flow that was dropped. The garbage collector may call this on any thread, and
        late.
        """
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
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(self.stop)


_Coroutine: Final = types.CoroutineType
_END: Final = object()
_SKIPPED: Final = object()
_FIRST_BATCH: Final = 8
_TIME_SLICE: Final = 0.001  # seconds that calls which never suspend may occupy the event loop
#: Keeps active flows alive: the event loop refers to tasks only weakly.
_ACTIVE: Final[set[Pullers]] = set()


@types.coroutine
def _one_loop_turn() -> Generator[None, None, None]:
    yield


def _being_canceled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
