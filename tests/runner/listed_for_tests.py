"""A module that says what it offers: one function of another module, and not all of its own."""

from __future__ import annotations

from os import getcwd

__all__ = ["getcwd"]


def inner():
    return "inner"
