"""Settings of the daemon: TOML < environment < flags, checked as a whole. `docs/settings.md` lists them."""

from __future__ import annotations

from penstock.settings.kinds import Address, show_span
from penstock.settings.reading import BadSettings, Setting, SettingProblem, describe, load
from penstock.settings.settings import Settings

__all__ = ["Address", "BadSettings", "Setting", "SettingProblem", "Settings", "describe", "load", "show_span"]
