"""
Where jobs live. A store never decides: it is handed changes that the core has decided on, and writes each down only if
the world is still as the decider saw it, with its events, in one transaction.
"""
