"""The steps of a program's loop, all at once or in turns.

A measurement gives the path of a Unix socket in TURNS_SOCKET. Each rank connects to it, says its number, and sleeps until it is told how
many steps to make; it answers with the seconds that these took. At the end of the stream the loop is over.
"""

import json
import os
import socket
import time


def steps(rank, total):
    """The numbers of the steps, `total` of them if nobody measures."""
    path = os.environ.get("TURNS_SOCKET")
    if path is None:
        yield from range(total)
        return
    turns = socket.socket(socket.AF_UNIX)
    turns.connect(path)
    lines = turns.makefile("rw")
    print(rank, file=lines, flush=True)
    n = 0
    for line in lines:
        begin = time.perf_counter()
        for _ in range(int(line)):
            yield n
            n += 1
        print(json.dumps({"seconds": time.perf_counter() - begin}), file=lines, flush=True)
