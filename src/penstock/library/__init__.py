"""
The durable scheduler inside a program: calls of functions are written to a store and run when capacity is
free.

`scheduler` has the public class; `function` and `handle` have what it returns; `job_runner` claims jobs, runs
them on the executors of `work`, and reports their ends.
"""
