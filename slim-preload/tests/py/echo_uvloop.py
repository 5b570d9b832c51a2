"""An echo server, or its client: several connections, every byte checked. Arguments: role, port.

SIGTERM ends it; the client first waits for its outstanding answers.
"""
import asyncio
import signal
import sys

import uvloop

CONNECTIONS = 8
role, port = sys.argv[1], int(sys.argv[2])


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)

    def connection_lost(self, why):
        if why:
            print("server:", why)


def terminated():
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    return over


async def serve():
    over = terminated()
    await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port)
    await over.wait()


async def one(number, over):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    rounds = 0
    while not over.is_set():
        sent = (f"{number}.{rounds} ".encode() * 30000)[: 1 + (rounds * 7919 + number * 104729) % 30000]
        writer.write(sent)
        got = await asyncio.wait_for(reader.readexactly(len(sent)), 15)
        assert got == sent, f"wrong bytes in round {rounds} of {number}"
        rounds += 1
    writer.close()
    await writer.wait_closed()
    return rounds


async def ask():
    over = terminated()
    rounds = await asyncio.gather(*(one(i, over) for i in range(CONNECTIONS)))
    print("all right")
    print("rounds", sum(rounds), file=sys.stderr)


uvloop.run(serve() if role == "server" else ask())
