"""
What a run may say about itself and ask, whichever way it comes: from a function through its worker, from a command through the
door, or over HTTP. A checkpoint and an amount spent are written down before the answer; progress rides on the next heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from penstock.core.json_text import parsed, storable_json
from penstock.core.refusals import Refused, Unavailable
from penstock.core.text import storable, type_name
from penstock.core.tracker import Tracker
from penstock.core.words import Money, money_of
from penstock.engine.desk import Answer, JobService
from penstock.runner.frames import Frame
from penstock.runner.runs import ActiveDispatch

__all__ = ["RunRequests"]

log = logging.getLogger("penstock.runner")

_MOST_CHECKPOINT: Final = 1_000_000
_MOST_MESSAGE: Final = 10_000


class RunRequests:
    """`note`: into the output of the run. `told`: what a heartbeat was answered."""

    def __init__(
        self,
        job_service: JobService,
        tracker: Tracker,
        note: Callable[[ActiveDispatch, str], None],
        told: Callable[[ActiveDispatch, Answer], None],
    ) -> None:
        self._job_service, self._tracker, self._note, self._told = job_service, tracker, note, told

    def answer(self, run: ActiveDispatch, call: Frame) -> Frame:
        # A function that talks to us at all will look; a command may only tell, and never ask.
        if run.worker is not None or call.get("op") == "should_yield":
            self._tracker.hears(run.dispatch_id)
        try:
            return self._answer(run, call)
        except _Wrong as error:
            return {"error": str(error)}
        except (Refused, Unavailable) as error:
            return {"error": str(error)}
        except Exception as error:  # whatever it is, the run that said it gets an answer
            log.exception("what job %s said cannot be written", run.job.job_id)
            return {"error": f"it cannot be written ({type_name(error)})"}

    def _answer(self, run: ActiveDispatch, call: Frame) -> Frame:
        match call.get("op"):
            case "checkpoint":
                return self._checkpoint(run, call.get("checkpoint"))
            case "progress":
                run.progress, run.untold = _fraction(call.get("progress")), True
            case "spend":
                run.spent += _amount(call.get("amount"))
                self._beat(run, spent=run.spent)
            case "log":
                message = call.get("message")
                if not isinstance(message, str):
                    raise _Wrong("message must be a text")
                self._note(run, storable(message[:_MOST_MESSAGE]))
            case "hears" | "should_yield":
                return {"yield": self._tracker.should_yield(run.dispatch_id)}
            case "yield":
                run.yielded = True
            case other:
                raise _Wrong(f"there is nothing called {other!r:.60} to say or ask")
        return {}

    def _checkpoint(self, run: ActiveDispatch, checkpoint: Any) -> Frame:
        if checkpoint is None:
            return {"checkpoint": run.checkpoint}
        if not isinstance(checkpoint, str) or len(checkpoint) > _MOST_CHECKPOINT:
            raise _Wrong(f"checkpoint must be at most {_MOST_CHECKPOINT} characters of JSON")
        checkpoint = storable_json(checkpoint)
        try:
            parsed(checkpoint)
        except (ValueError, RecursionError) as error:
            raise _Wrong(f"checkpoint is no JSON: {error}") from error
        self._beat(run, checkpoint=checkpoint)
        run.checkpoint = checkpoint
        return {}

    def _beat(self, run: ActiveDispatch, **what: Any) -> None:
        answer = self._job_service.heartbeat(run.dispatch_id, progress=run.progress, **what)
        run.untold = False
        self._told(run, answer)


class _Wrong(ValueError):
    pass


def _fraction(said: Any) -> float:
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 <= said <= 1:
        raise _Wrong("progress must be 0..1")
    return float(said)


def _amount(said: Any) -> Money:
    try:
        amount = money_of(said)
    except ValueError:
        amount = -1
    if amount < 0:
        raise _Wrong("amount must be a number that is not negative, in the job's unit")
    return amount
