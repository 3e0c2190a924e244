"""
What every way to run a job function shares: the context, the outcome, the executors, the lease keeper.

The library, the SDK worker and the runner hand a channel to the context, and are thin besides. `context` and `outcome`
need the standard library only: a warm worker of the runner may run on a Python that has nothing else.
"""
