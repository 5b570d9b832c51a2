// An echo server, or its client: several connections, every byte checked. Arguments: role, port. SIGTERM ends it; the client
// first waits for its outstanding answers.
'use strict';
const net = require('net');
const [role, port] = process.argv.slice(2);
const CONNECTIONS = 8;

function server() {
  const s = net.createServer((c) => {
    c.on('error', (e) => console.log(`server: ${e.code}`));
    c.pipe(c);
  });
  s.on('error', (e) => { console.log(`listen: ${e.code}`); process.exit(1); });
  s.listen(Number(port), '127.0.0.1');
  process.on('SIGTERM', () => process.exit(0));
}

function client() {
  let over = false;
  process.on('SIGTERM', () => { over = true; });
  let open = CONNECTIONS, rounds = 0, bad = 0;
  for (let i = 0; i < CONNECTIONS; i++) {
    const c = net.connect(Number(port), '127.0.0.1');
    let sent, got = 0, round = 0, since = Date.now();
    const send = () => {
      sent = Buffer.alloc(1 + (round * 7919 + i * 104729) % 30000, `${i}.${round} `);
      got = 0;
      c.write(sent);
    };
    c.on('connect', send);
    c.on('data', (d) => {
      since = Date.now();
      if (!sent.subarray(got, got + d.length).equals(d)) bad++;
      got += d.length;
      if (got < sent.length) return;
      round++;
      rounds++;
      if (!over) send();
      else c.end();
    });
    const watch = setInterval(() => {
      if (Date.now() - since > 15000) { console.log(`HANG of ${i} in round ${round}, ${got} of ${sent.length}`); process.exit(1); }
    }, 500);
    c.on('error', (e) => { console.log(`client: ${e.code}`); bad++; });
    c.on('close', () => {
      clearInterval(watch);
      if (--open === 0) {
        console.log(bad ? `bad ${bad}` : 'all right');
        console.error(`rounds ${rounds}`);
      }
    });
  }
}

role === 'server' ? server() : client();
