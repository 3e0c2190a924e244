"""
Tools for tests and benchmarks of programs that use Penstock. `penstock.testing.plugin` has fixtures for
pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.testing.virtual import VirtualClock as VirtualClock
    from penstock.testing.virtual import VirtualScheduler as VirtualScheduler

__all__ = ["VirtualClock", "VirtualScheduler"]


def __getattr__(name: str) -> Any:
    # Imported on first use: every pytest run in an environment with Penstock loads the plugin.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.testing import virtual  # noqa: PLC0415  # as said

    return getattr(virtual, name)
