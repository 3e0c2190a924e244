"""Settings of the daemon: TOML < environment < flags, checked as a whole. `docs/settings.md` lists them."""

from __future__ import annotations

from penstock.settings.kinds import Address, show_span
from penstock.settings.reading import BadSettings, Setting, SettingProblem, Settings, load

__all__ = ["Address", "BadSettings", "Setting", "SettingProblem", "Settings", "load", "show_span"]
