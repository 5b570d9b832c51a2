//! Writes of a peer that come too late, or to a wrong place.

use std::{
    thread,
    time::{Duration, Instant},
};

use slim_rdma::{
    Access, AdapterEvent, Completed, Completion, PairAddress, PairSizes, Payload, ReadWork,
    RegionId, RemoteKey, Verbs, WorkError, WriteWork,
    ibverbs::{ProgramAccess, ProgramMemory, ProgramPort, VerbsAdapter},
};

use super::{DETECTION, Rxe, rxe, sizes, wait};

/// A queue pair without the protocol, with a region.
struct Raw<'a> {
    adapter: &'a mut VerbsAdapter,
    own: PairAddress,
    region: RegionId,
}

const LEN: usize = 1 << 16;
/// Bytes of a read.
const LONG: usize = 1 << 20;
const DEPTH: u64 = 64;

fn raw(adapter: &mut VerbsAdapter) -> Raw<'_> {
    let region = adapter.register(LEN, Access::Remote).unwrap();
    let sizes = PairSizes {
        depth: DEPTH as u32,
        ..sizes(1 << 16, DEPTH)
    };
    let mut own = adapter.create(&sizes).unwrap().address;
    own.ring = adapter.remote_key(region);
    for id in 0..DEPTH {
        adapter.post_receive(own.number, id).unwrap();
    }
    Raw {
        adapter,
        own,
        region,
    }
}

fn two(adapters: &mut [VerbsAdapter; 2]) -> [Raw<'_>; 2] {
    let [here, there] = adapters;
    let (near, far) = (raw(here), raw(there));
    near.adapter.connect(near.own.number, &far.own).unwrap();
    far.adapter.connect(far.own.number, &near.own).unwrap();
    [near, far]
}

impl Raw<'_> {
    /// Writes `len` bytes of this value at this place of the peer's region.
    fn write(&mut self, id: u64, value: u8, to: RemoteKey, len: usize) {
        self.adapter.write(self.region, 0, &vec![value; len]);
        let payload = Payload::Staged {
            region: self.region,
            at: 0,
            len,
        };
        let work = WriteWork {
            id,
            payload,
            to,
            immediate: Some(7),
            signaled: true,
        };
        self.adapter.post_write(self.own.number, &work).unwrap();
    }

    /// The next completion is this one.
    fn completes(&mut self, id: u64, how: Completed) {
        let (number, adapter) = (self.own.number, &mut *self.adapter);
        let next = wait("a completion", DETECTION, || adapter.poll(number));
        assert_eq!(next, Completion { id, how });
    }

    fn memory(&self) -> Vec<u8> {
        let mut all = vec![0; LEN];
        self.adapter.read(self.region, 0, &mut all);
        all
    }

    fn release(self) {
        self.adapter.destroy(self.own.number);
        self.adapter.invalidate(self.region);
        self.adapter.release(self.region);
        assert!(self.adapter.is_empty());
    }
}

#[test]
fn late_and_wrong_writes_do_not_land() {
    let Some(rxe) = rxe("fences::late_and_wrong_writes_do_not_land") else {
        return;
    };
    let mut adapters = rxe.open();

    // The region is invalid, and the queue pair works.
    let [mut near, mut far] = two(&mut adapters);
    let ring = far.own.ring;
    near.write(1, 0x11, ring, 1000);
    let (len, immediate) = (1000, 7);
    let received = Completed::Received { len, immediate };
    far.completes(0, received);
    near.completes(1, Completed::Written);
    assert!(far.memory()[..1000] == [0x11; 1000] && far.memory()[1000] == 0);
    far.adapter.invalidate(far.region);
    near.write(2, 0x22, ring, 1000);
    let refused = Completed::Failed(WorkError::RemoteAccess);
    near.completes(2, refused);
    assert!(far.memory()[..1000] == [0x11; 1000]);
    near.release();
    far.release();

    // One byte of the write is outside of the region; both sides learn of it.
    let [mut near, far] = two(&mut adapters);
    let RemoteKey { addr, key } = far.own.ring;
    let addr = addr + LEN as u64 - 99;
    near.write(1, 0x33, RemoteKey { addr, key }, 100);
    near.completes(1, refused);
    assert!(far.memory() == [0; LEN]);
    // By an event, or by a failed receive: the latter with soft RoCE.
    let number = far.own.number;
    wait("an error", DETECTION, || {
        let event = far.adapter.event() == Some(AdapterEvent::PairFailed(number));
        let failed = far.adapter.poll(number).map(|done| done.how);
        (event || matches!(failed, Some(Completed::Failed(_)))).then_some(())
    });
    near.release();
    far.release();

    // A key of a region that is gone, on a queue pair of today.
    let old = {
        let [near, far] = two(&mut adapters);
        let old = far.own.ring;
        near.release();
        far.release();
        old
    };
    let [mut near, far] = two(&mut adapters);
    near.write(
        1,
        0x44,
        RemoteKey {
            addr: far.own.ring.addr,
            key: old.key,
        },
        100,
    );
    near.completes(1, refused);
    assert!(far.memory() == [0; LEN]);
    near.release();
    far.release();
    for adapter in &mut adapters {
        while adapter.event().is_some() {}
    }

    // Writes are on their way while the region becomes invalid. With the steps of a suspension, and with the last one alone.
    rxe.line("delay 2ms 1ms");
    let (mut some, mut none) = (0, 0);
    for round in 0..40 {
        let [mut near, far] = two(&mut adapters);
        let ring = far.own.ring;
        for id in 0..16 {
            let (addr, key) = (ring.addr + id * 4096, ring.key);
            near.write(id, 0x55, RemoteKey { addr, key }, 4096);
        }
        thread::sleep(Duration::from_micros(round * 150));
        if round % 2 == 0 {
            far.adapter.fail(far.own.number);
            far.adapter.destroy(far.own.number);
        }
        far.adapter.invalidate(far.region);
        let then = far.memory();
        match then.iter().filter(|byte| **byte == 0x55).count() {
            0 => none += 1,
            n if n < LEN => some += 1,
            _ => {}
        }
        thread::sleep(Duration::from_millis(6));
        assert!(far.memory() == then, "round {round}");
        near.release();
        far.release();
    }
    println!("40 rounds: nothing had landed in {none}, a part in {some}");
    assert!(none > 0 && none < 40);
}

/// Reads of program memory: only while it is registered, only where that is allowed, and nothing is placed after the queue pair is destroyed.
#[test]
fn late_and_wrong_reads_do_not_land() {
    let Some(rxe) = rxe("fences::late_and_wrong_reads_do_not_land") else {
        return;
    };
    let mut adapters = rxe.open();
    let ports = adapters.each_ref().map(VerbsAdapter::program_port);
    assert!(ports.iter().all(ProgramPort::survives_forks));
    let mut source = vec![0x11_u8; LONG];
    let mut sink = vec![0_u8; LONG];
    let register = |port: &ProgramPort, memory: &mut [u8], access| {
        // SAFETY: both live until the end of the test, and the registrations end before.
        unsafe { port.register(memory.as_mut_ptr(), memory.len(), access) }.unwrap()
    };
    let addr = |memory: &[u8]| memory.as_ptr() as u64;

    let from = register(&ports[1], &mut source, ProgramAccess::Readable);
    let into = register(&ports[0], &mut sink, ProgramAccess::Sink);
    let work =
        |id, from: &ProgramMemory, into: &ProgramMemory, source: &[u8], sink: &[u8]| ReadWork {
            id,
            from: RemoteKey {
                addr: addr(source),
                key: from.remote_key(),
            },
            into: into.local_key(addr(sink)),
            len: LONG as u32,
        };
    let [mut near, far] = two(&mut adapters);
    let number = near.own.number;
    let first = work(1, &from, &into, &source, &sink);
    near.adapter.post_read(number, &first).unwrap();
    near.completes(1, Completed::Read);
    assert!(sink.iter().all(|byte| *byte == 0x11));

    // The queue pair is destroyed with reads on their way.
    source.fill(0x22);
    for id in 2..6 {
        let next = work(id, &from, &into, &source, &sink);
        near.adapter.post_read(number, &next).unwrap();
    }
    near.release();
    far.release();
    sink.fill(0x33);
    thread::sleep(Duration::from_millis(300));
    assert!(sink.iter().all(|byte| *byte == 0x33));

    // Memory that is not registered any more, or that is only for the own adapter.
    let gone = register(&ports[1], &mut source, ProgramAccess::Readable);
    let old = work(1, &gone, &into, &source, &sink);
    drop(gone);
    let own = register(&ports[1], &mut source, ProgramAccess::Sink);
    let unreadable = work(1, &own, &into, &source, &sink);
    for read in [old, unreadable] {
        let [mut near, far] = two(&mut adapters);
        near.adapter.post_read(near.own.number, &read).unwrap();
        near.completes(1, Completed::Failed(WorkError::RemoteAccess));
        near.release();
        far.release();
    }
    assert!(sink.iter().all(|byte| *byte == 0x33));
}

/// Reads of one thread's own queue pairs, which break again and again. Returns how many were done, and on how many queue pairs some were not.
fn read_on_breaking_pairs(rxe: &Rxe, until: Instant, refused: bool) -> (u32, u32) {
    const READS: usize = 8;
    /// Number of the write behind the first read.
    const BEHIND: u64 = 100;
    let mut adapters = rxe.open();
    let ports = adapters.each_ref().map(VerbsAdapter::program_port);
    let mut source = vec![0x11_u8; LONG];
    let mut sinks = vec![0x33_u8; READS * LONG];
    let register = |port: &ProgramPort, memory: &mut [u8], access| {
        // SAFETY: both live until the end of the function, and the registrations end before.
        unsafe { port.register(memory.as_mut_ptr(), memory.len(), access) }.unwrap()
    };
    let from = register(&ports[1], &mut source, ProgramAccess::Readable);
    let into = register(&ports[0], &mut sinks, ProgramAccess::Sink);
    let (mut done, mut broken) = (0, 0);
    while Instant::now() < until {
        let [mut near, far] = two(&mut adapters);
        let number = near.own.number;
        sinks.fill(0x33);
        for id in 0..READS {
            let sink = sinks[id * LONG..].as_ptr() as u64;
            let work = ReadWork {
                id: id as u64,
                from: RemoteKey {
                    addr: source.as_ptr() as u64,
                    key: from.remote_key(),
                },
                into: into.local_key(sink),
                len: LONG as u32,
            };
            near.adapter.post_read(number, &work).unwrap();
            let RemoteKey { addr, key } = far.own.ring;
            let out_of_it = u64::from(refused && id == READS / 2) * LEN as u64;
            let to = RemoteKey {
                addr: addr + out_of_it,
                key,
            };
            near.write(BEHIND + id as u64, 0x44, to, 100);
        }
        let mut left = READS;
        while left > 0 {
            let next = wait("a completion", Duration::from_secs(20), || {
                near.adapter.poll(number)
            });
            match next.how {
                Completed::Read => {}
                Completed::Written => {
                    let id = next.id - BEHIND;
                    let sink = &sinks[id as usize * LONG..][..LONG];
                    assert!(sink.iter().all(|byte| *byte == 0x11), "read {id}");
                    (left, done) = (left - 1, done + 1);
                }
                _ => {
                    broken += 1;
                    break;
                }
            }
        }
        near.release();
        far.release();
    }
    (done, broken)
}

/// Soft RoCE, on a busy machine, reports reads as done whose queue pair is about to fail, and whose bytes are not there. Nothing behind
/// them is done then.
#[test]
fn a_read_has_its_bytes_when_work_behind_it_is_done() {
    let Some(rxe) = rxe("fences::a_read_has_its_bytes_when_work_behind_it_is_done") else {
        return;
    };
    let until = Instant::now() + Duration::from_secs(20);
    let (mut done, mut broken) = (0, 0);
    thread::scope(|scope| {
        let readers = [false, false, false, false, false, true];
        let rxe = &rxe;
        let readers =
            readers.map(|refused| scope.spawn(move || read_on_breaking_pairs(rxe, until, refused)));
        while readers.iter().any(|reader| !reader.is_finished()) {
            thread::sleep(Duration::from_millis(600));
            rxe.line("loss 100%");
            thread::sleep(Duration::from_millis(900));
            rxe.plain();
        }
        for reader in readers {
            let (read, breaks) = reader.join().unwrap();
            (done, broken) = (done + read, broken + breaks);
        }
    });
    println!("{done} reads were done, {broken} queue pairs broke");
    assert!(done > 100 && broken > 20);
}
