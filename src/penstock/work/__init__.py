"""
Running a job function, as library, SDK worker and runner do it alike: context, outcome, executors, lease
keeper.

Each of the three gives the context a channel of its own. `context` and `outcome` need only the standard
library: a warm worker of the runner may run on a Python that has nothing else.
"""
