//! A real connection is killed after a given number of bytes of an exchange: every number in the long version.

mod common;

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use common::{
    events::Events,
    python::{lab_with_python, under_slim},
    soak,
};
use slim_lab::{
    Lab, SeededRng,
    faults::destroy::{self, Amount, Selector},
};

/// Bytes of an exchange, in each direction.
const BYTES: usize = 64 << 10;

/// One end: `server ADDRESS` or `client ADDRESS`. It takes a line for each exchange: the end that stops, and after how many bytes. That end
/// then says AT, and goes on after the next line. Each end checks all bytes.
const PROGRAM: &str = r#"
import random, socket, sys
role, host, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "server":
    listener = socket.create_server((host, 7000))
    print("READY", flush=True)
    s, _ = listener.accept()
else:
    s = socket.create_connection((host, 7000))
# The session is there once bytes have gone both ways and back.
for n in range(3):
    s.sendall(b"x")
    assert s.recv(1) == b"x"
print("BEGUN", flush=True)
def send(number, stop):
    data = random.Random(f"{role} {number}").randbytes(size)
    s.sendall(data[:stop])
    if stops:
        print("AT", flush=True)
        sys.stdin.readline()
    s.sendall(data[stop:])
def receive(number):
    data = bytearray()
    while len(data) < size:
        part = s.recv(size - len(data))
        assert part, "end of stream"
        data += part
    other = "client" if role == "server" else "server"
    assert data == random.Random(f"{other} {number}").randbytes(size), "wrong bytes"
for number, line in enumerate(iter(sys.stdin.readline, "")):
    who, at = line.split()
    stops = who == role
    at = int(at) if stops else size
    if role == "client":
        send(number, at)
        receive(number)
        print("OK", flush=True)
    else:
        receive(number)
        send(number, at)
print("DONE", flush=True)
"#;

struct End {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl End {
    /// Starts one end. It is ended after the time that a run may take.
    fn start(lab: &Lab, node: usize, role: &str) -> Self {
        let mut command: Command = lab.node(node).command("timeout");
        let limit = if soak() { "14400" } else { "60" };
        command.args([limit, "/usr/bin/python3", "-c", PROGRAM, role]);
        command.args([lab.node(1).address(0).to_string(), BYTES.to_string()]);
        under_slim(&mut command, lab);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start a program");
        End {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    fn expect(&mut self, word: &str) {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), word);
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input.as_ref().unwrap(), "{line}").unwrap();
    }
}

#[test]
fn a_kill_at_any_byte_of_an_exchange_is_survived() {
    let Some(lab) = lab_with_python("offsets", 2, 1) else {
        return;
    };
    let mut server = End::start(&lab, 1, "server");
    server.expect("READY");
    let mut client = End::start(&lab, 0, "client");
    client.expect("BEGUN");
    server.expect("BEGUN");
    let roles: &[&str] = &["client", "server"];
    let mut kills = 0;
    for (n, at) in (0..=BYTES)
        .step_by(if soak() { 1 } else { 1021 })
        .enumerate()
    {
        // Each end stops at each byte in the long version, else in turn.
        let stopping = if soak() { roles } else { &roles[n % 2..][..1] };
        for who in stopping {
            let order = format!("{who} {at}");
            client.tell(&order);
            server.tell(&order);
            let end = match *who {
                "client" => &mut client,
                _ => &mut server,
            };
            end.expect("AT");
            let net = lab.node(n / 2 % 2).net();
            let rng = &mut SeededRng::new(1);
            let pick = Selector::between_hosts();
            let report = destroy::destroy(net, &pick, Amount::All, rng).unwrap();
            assert_eq!(report.connections.len(), 1, "{order}: {report}");
            kills += 1;
            end.tell("go on");
            client.expect("OK");
        }
    }
    for end in [&mut client, &mut server] {
        end.input = None;
        end.expect("DONE");
        assert!(end.child.wait().unwrap().success());
    }
    let events = Events::read(&lab);
    println!("{kills} kills; {events}");
    assert_eq!(events.count("escalate"), 0, "{events}");
    assert_eq!(events.count("resume"), 2 * kills, "{events}");
}
