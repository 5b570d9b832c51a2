//! A stream under arbitrary calls, for adapters of any kind.

use std::io::IoSlice;

use slim_rdma::{HalfPair, PairError, PairSizes, Pieces, QueuePair, Verbs};

/// What a caller does, at which side, and with how much.
#[derive(Clone, Debug)]
pub enum Call {
    Send(usize, usize),
    Recv(usize, usize),
    Progress(usize),
    Tell(usize),
    Ping(usize),
    /// Something happens in the network.
    Steps(usize),
    End(usize),
}

/// Everything happens in the network.
pub const ALL: usize = usize::MAX;

/// Byte `at` of a side's stream.
pub fn byte(side: usize, at: u64) -> u8 {
    ((at * 7 + at / 256) % 251) as u8 ^ (side as u8 * 0x80)
}

/// `len` bytes of a side's stream, from `at`.
pub fn bytes(side: usize, at: u64, len: usize) -> Vec<u8> {
    (at..at + len as u64).map(|at| byte(side, at)).collect()
}

/// Two queue pairs that are connected to each other.
pub fn connect<V: Verbs>(adapters: &mut [V; 2], sizes: [PairSizes; 2]) -> [QueuePair; 2] {
    let [a, b] = [0, 1].map(|n| HalfPair::open(&mut adapters[n], sizes[n]).unwrap());
    let addresses = [a.address(), b.address()];
    [
        a.connect(&mut adapters[0], &addresses[1]).unwrap(),
        b.connect(&mut adapters[1], &addresses[0]).unwrap(),
    ]
}

/// Makes these calls, and then lets both sides end. All bytes must come, in order, and both sides must come to their end. `steps` lets so
/// much happen in the network.
pub fn stream<V: Verbs>(
    adapters: &mut [V; 2],
    sizes: [PairSizes; 2],
    calls: impl IntoIterator<Item = Call>,
    mut steps: impl FnMut(usize),
) {
    let mut pairs = connect(adapters, sizes);
    let (mut sent, mut read, mut ended, mut seen) = ([0; 2], [0; 2], [false; 2], [false; 2]);
    // In the end, both sides end and everything is carried out.
    let rest = (0..20_000).flat_map(|_| {
        [
            Call::Steps(40),
            Call::Recv(0, 500),
            Call::Recv(1, 500),
            Call::End(0),
            Call::End(1),
        ]
    });
    for call in calls.into_iter().chain(rest) {
        match call {
            Call::Send(s, n) => {
                let data = bytes(s, sent[s], n);
                let (first, rest) = data.split_at(n / 3);
                let slices = [first, &rest[..n / 5], &rest[n / 5..]].map(IoSlice::new);
                match pairs[s].send_pieces(&mut adapters[s], &mut Pieces::new(&slices)) {
                    Ok(n) => sent[s] += n as u64,
                    Err(PairError::Ended) => assert!(ended[s]),
                    Err(e) => assert_eq!(e, PairError::WouldBlock),
                }
            }
            Call::Recv(s, n) => {
                let mut buf = vec![0; n];
                match pairs[s].recv(&mut adapters[s], &mut buf) {
                    Ok(0) if n > 0 => {
                        assert!(ended[1 - s] && read[s] == sent[1 - s]);
                        seen[s] = true;
                    }
                    Ok(n) => {
                        assert!(buf[..n] == bytes(1 - s, read[s], n), "side {s}");
                        read[s] += n as u64;
                    }
                    Err(e) => assert_eq!(e, PairError::WouldBlock),
                }
            }
            Call::Progress(s) => drop(pairs[s].progress(&mut adapters[s])),
            Call::Tell(s) => pairs[s].tell_count(&mut adapters[s]),
            Call::Ping(s) => pairs[s].ping(&mut adapters[s]),
            Call::Steps(n) => steps(n),
            Call::End(s) if s < 2 => {
                ended[s] = true;
                pairs[s].end(&mut adapters[s]);
            }
            Call::End(_) => {}
        }
        for s in [0, 1] {
            assert_eq!(pairs[s].broken(), None);
            assert!(pairs[s].recorded_by_peer() <= pairs[1 - s].received());
            assert!(pairs[1 - s].received() <= sent[s]);
        }
        if seen == [true; 2] {
            break;
        }
    }
    assert_eq!(seen, [true; 2], "both sides come to an end");
    // At the end the counts are told, too.
    for _ in 0..100 {
        for s in [0, 1] {
            pairs[s].progress(&mut adapters[s]);
            pairs[s].tell_count(&mut adapters[s]);
        }
        steps(ALL);
    }
    for (s, pair) in pairs.into_iter().enumerate() {
        assert_eq!(pair.recorded_by_peer(), sent[s]);
        pair.release(&mut adapters[s]);
    }
}
