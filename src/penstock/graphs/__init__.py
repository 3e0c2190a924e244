"""
Graphs of steps inside one program: written in `builder`, run by `executor`, looked at in `trace` and
`picture`.
"""
