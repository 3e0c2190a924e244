"""
The payload of a call to a cluster worker: pickled for a machine that may lack the caller's script, with what is large
beside it in Ray's object store.

It lies there from before the call enters the queue until it is settled, so that a requeued call does not copy it again.
"""

from __future__ import annotations

import pickle
from typing import Any

from penstock.local import wire
from penstock.local.call import Call
from penstock.local.packing import PackedFunction, Packer


class ClusterPacker(Packer):
    def __init__(self, ray: Any) -> None:
        super().__init__()
        self._ray = ray

    def _function(self, fn: Any) -> PackedFunction | None:
        """What is in `__main__` travels by value, with each call: no other machine could import it."""
        return None if getattr(fn, "__module__", None) == "__main__" else super()._function(fn)

    def _pack(self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data, buffers = wire.pack_arguments(fn, args, kwargs, portable=True)
        large = buffers or len(data) >= wire.LARGE
        call.body = self._ray.put([data, *map(pickle.PickleBuffer, buffers)]) if large else data


def unpack(body: Any) -> Any:
    """
    Pickled bytes, or a list of them and their buffers. Buffers are copied: those in the object store are read-only and
    shared by all, and an array that came by a process worker can be written to, too.
    """
    if type(body) is bytes:
        return pickle.loads(body)
    data, *buffers = body
    return pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])
