"""What Python's standard library does with connections: clients and servers of several kinds, each over loopback.

Its transcript has nothing that may differ between two correct runs.
"""

import asyncio
import hashlib
import http.client
import http.server
import os
import selectors
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

BIG = bytes(range(256)) * 40000


def await_negotiation():
    time.sleep(int(os.environ.get("T_NEGOTIATION_MS", "0")) / 1000)


def say(*words):
    print(*words, flush=True)


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = hashlib.sha256(body).hexdigest().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def http_client(directory):
    say("-- http.server, http.client, urllib")
    with open(os.path.join(directory, "big"), "wb") as f:
        f.write(BIG)
    serve = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: Handler(*a, directory=directory)
    )
    threading.Thread(target=serve.serve_forever, daemon=True).start()
    port = serve.server_address[1]
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for n in range(5):
        c.request("GET", "/big")
        await_negotiation()
        r = c.getresponse()
        say(r.status, hashlib.sha256(r.read()).hexdigest()[:16], r.getheader("Content-Length"))
    c.request("POST", "/", body=BIG)
    say(c.getresponse().read()[:16])
    c.request("GET", "/nothing")
    say(c.getresponse().status)
    c.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/big") as r:
        say(len(r.read()))
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/nothing")
    except urllib.error.HTTPError as e:
        say(e.code)
    serve.shutdown()
    serve.server_close()
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/big")
    except urllib.error.URLError as e:
        say(type(e.reason).__name__)


def coroutines():
    say("-- asyncio")

    async def answer(reader, writer):
        while line := await reader.readline():
            writer.write(line.upper())
            await writer.drain()
        writer.close()

    async def ask(port, n):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(int(os.environ.get("T_NEGOTIATION_MS", "0")) / 1000)
        good = 0
        for i in range(20):
            writer.write(f"question {n} {i}\n".encode())
            await writer.drain()
            good += await reader.readline() == f"QUESTION {n} {i}\n".encode()
        writer.write(b"x" * 1000000 + b"\n")
        writer.write_eof()
        tail = await reader.read()
        writer.close()
        await writer.wait_closed()
        return good, len(tail), tail[:1]

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 21)
        port = server.sockets[0].getsockname()[1]
        say(*await asyncio.gather(*(ask(port, n) for n in range(10))))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.wait_for(reader.read(1), 0.1)
        except asyncio.TimeoutError:
            say("timed out")
        writer.close()
        server.close()
        try:
            await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError as e:
            say("refused", e.errno)

    asyncio.run(main())


def forking():
    say("-- a forking server")

    class Echo(socketserver.StreamRequestHandler):
        def handle(self):
            for line in self.rfile:
                self.wfile.write(line[::-1])

    class Server(socketserver.ForkingTCPServer):
        allow_reuse_address = True

    server = Server(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for n in range(5):
        with socket.create_connection(server.server_address) as s:
            await_negotiation()
            f = s.makefile("rwb")
            for i in range(3):
                f.write(b"%d and %d\n" % (n, i))
                f.flush()
            s.shutdown(socket.SHUT_WR)
            say(f.read())
    server.shutdown()
    server.server_close()


def plain():
    say("-- sockets")
    listener = socket.create_server(("127.0.0.1", 0))
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    await_negotiation()
    a.settimeout(0.05)
    try:
        a.recv(1)
    except TimeoutError as e:
        say("timeout", e)
    b.sendall(b"with a time limit")
    say(a.recv(100))
    a.settimeout(None)
    with tempfile.TemporaryFile() as f:
        f.write(BIG)
        f.seek(0)
        got = []
        t = threading.Thread(target=lambda: got.append(len(b.recv(len(BIG), socket.MSG_WAITALL))))
        t.start()
        say("sendfile", a.sendfile(f))
        t.join()
        say(got)
    view = bytearray(10)
    a.sendmsg([b"head", b"tail"])
    say(b.recvmsg_into([view]), view)
    selector = selectors.DefaultSelector()
    selector.register(b, selectors.EVENT_READ | selectors.EVENT_WRITE, "b")
    say([(k.data, e) for k, e in selector.select(1)])
    a.send(b"!")
    while not selector.select(0)[0][1] & selectors.EVENT_READ:
        time.sleep(0.001)
    say([(k.data, e) for k, e in selector.select(1)])
    say(b.recv(5))
    a.close()
    while not selector.select(0)[0][1] & selectors.EVENT_READ:
        time.sleep(0.001)
    say(b.recv(5))
    selector.close()
    b.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    b.close()
    c = socket.create_connection(listener.getsockname())
    d, _ = listener.accept()
    await_negotiation()
    d.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    d.close()
    try:
        c.recv(1)
    except ConnectionResetError as e:
        say("reset", e.errno)
    try:
        c.send(b"x")
    except BrokenPipeError as e:
        say("broken pipe", e.errno)
    c.close()
    child = subprocess.run(
        [sys.executable, "-c", "import socket; print(socket.create_server(('127.0.0.1', 0)).fileno())"],
        capture_output=True,
        check=True,
    )
    say(child.stdout)
    e = socket.create_connection(listener.getsockname())
    f, _ = listener.accept()
    await_negotiation()
    child = subprocess.run(["cat"], stdin=subprocess.DEVNULL, stdout=e.fileno(), check=True)
    child = subprocess.Popen(["sh", "-c", "read line; echo heard $line"], stdin=e.fileno(), stdout=e.fileno())
    f.sendall(b"from afar\n")
    child.wait()
    say(f.recv(100))
    f.close()
    e.close()
    listener.close()


signal.alarm(60)
with tempfile.TemporaryDirectory() as d:
    http_client(d)
coroutines()
forking()
plain()
