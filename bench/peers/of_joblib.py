from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from joblib import Parallel, delayed

from bench.peers import WORKERS, Peer


class Joblib(Peer):
    """Joblib calls in batches of its own making; `batch_size=1` turns that off, as for everybody."""

    def __enter__(self) -> Self:
        self.parallel = Parallel(n_jobs=WORKERS, batch_size=1).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.parallel.__exit__(None, None, None)

    def call(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return self.parallel([delayed(fn)(item)])[0]

    def burst(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        return self.parallel(delayed(fn)(item) for item in items)

    def feed(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        stream = Parallel(n_jobs=WORKERS, batch_size=1, return_as="generator_unordered")
        return stream(delayed(fn)(item) for item in items)
