"""
The scheduler's parts. The driver calls `step(now)` of a part, which returns the moment of its next call. No
part waits, sleeps or reads a clock of its own.
"""
