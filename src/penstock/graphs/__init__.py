"""
Graphs of steps inside one program: `builder` makes them, `executor` runs them, `trace` and `picture` show
runs.
"""
