"""
The scheduler's parts. Each is asked `step(now)` and answers when it wants to be asked again; none of them waits, sleeps or
looks at a clock. `driver` is the one file that does.
"""
