"""
The scheduler's parts. The driver calls `step(now)` of a part, which answers when to be called again; no part
waits, sleeps or reads a clock of its own.
"""
