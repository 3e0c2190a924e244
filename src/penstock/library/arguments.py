"""
A function's arguments and result as JSON, both ways, by its annotations.

Never pickle: a file that anybody on the host may write to must not be able to run code. What JSON cannot carry there and back is
refused when it is enqueued, by the name of the argument: found at run time it would be a failure in the night, far from its cause.
So every argument is decoded again at once, and what would come back must equal what was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Any, Final

import msgspec

from penstock.core.errors import BadArgument
from penstock.core.text import safe_repr
from penstock.work.context import annotation, is_context
from penstock.work.json_codec import encode, from_text, plain

__all__ = ["Arguments"]

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
            return plain(text)  # it returned something else than it says; the caller gets what there is

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
