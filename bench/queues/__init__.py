"""
One adapter per job queue. Each is a module with the same few functions, called in processes of their own:

    prepare()           an empty queue
    session()           a connected submitter: yields a function that submits one job and returns when that is answered
    submit_bulk(count)  in the largest portions it takes; absent where a peer has nothing of the kind
    work()              run jobs until killed, at the best setting that we could find
    work_in_processes() the same in two processes that the queue itself starts and minds; absent where it has none

and `GUARANTEE`, what an answered submit is worth. The job is `tick`, which costs a microsecond and tells when it ran.
"""
