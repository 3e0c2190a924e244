"""
The durable scheduler inside a program: functions whose calls are written down first and run later, when there is room.

`scheduler` is what people hold; `job_runner` claims and settles; `executors` are what a function runs on: threads, an event loop, processes.
"""
