"""
The durable scheduler inside a program: functions whose calls are written to a store first and run when capacity is free.

`scheduler` is the public class; `function` and `handle` are what its users get; `job_runner` claims jobs and reports
their ends, on the executors of `work`.
"""
