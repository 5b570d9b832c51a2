//! Children of a fork, which inherit the handles of their parent.

use std::{
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr, thread,
    time::Duration,
};

use nix::sys::wait::{WaitStatus, waitpid};
use slim_rdma::{Access, Datagrams, HalfPair, Verbs, ibverbs::VerbsAdapter};

use super::{connect, readable, release, rxe, sizes, transfer};

/// Runs `f` in a child of a fork, and waits for it. Nothing of it is dropped there but by `f`.
fn in_child(f: impl FnOnce()) -> WaitStatus {
    // SAFETY: the child runs `f`, which takes no lock that another thread may hold, and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let done = catch_unwind(AssertUnwindSafe(f));
        // SAFETY: it takes a number.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    waitpid(nix::unistd::Pid::from_raw(pid), None).unwrap()
}

fn is_well(status: WaitStatus) -> bool {
    matches!(status, WaitStatus::Exited(_, 0))
}

/// Drops what the calling child has inherited.
fn drop_inherited(adapters: &mut [ManuallyDrop<VerbsAdapter>; 2]) {
    for adapter in adapters {
        // SAFETY: the parent's one is another one. The child ends before anybody uses its own one again.
        unsafe { ManuallyDrop::drop(adapter) };
    }
}

#[test]
fn a_child_leaves_its_parents_objects_alone() {
    let Some(rxe) = rxe("children::a_child_leaves_its_parents_objects_alone") else {
        return;
    };
    let mut adapters = rxe.open();
    let mut pairs = connect(&mut adapters, [sizes(1 << 16, 64); 2]);
    transfer(&mut adapters, &mut pairs, 100_000, 1000);

    // It drops the handles.
    let mut inherited = adapters.map(ManuallyDrop::new);
    let status = in_child(|| drop_inherited(&mut inherited));
    let mut adapters = inherited.map(ManuallyDrop::into_inner);
    assert!(is_well(status), "{status:?}");
    transfer(&mut adapters, &mut pairs, 100_000, 1000);

    // It calls everything. Above all it takes no report: the parent would wait for it for ever when it destroys the queue.
    assert!(pairs[1].arm(&mut adapters[1]));
    pairs[0].send(&mut adapters[0], &[1]).unwrap();
    assert!(readable(adapters[1].completion_descriptor(), 1000));
    let status = in_child(|| {
        let [here, there] = &mut adapters;
        assert_eq!((there.reported(), there.event()), (None, None));
        assert!(HalfPair::open(here, sizes(4096, 16)).is_err());
        assert!(here.create(&sizes(4096, 16)).is_err());
        assert_eq!(there.poll(pairs[1].number()), None);
        there.fail(pairs[1].number());
        assert!(pairs[0].send(here, &[2]).is_err());
        let _ = pairs[1].recv(there, &mut [0; 10]);
        pairs[1].suspend(there);
    });
    assert!(is_well(status), "{status:?}");
    let mut buf = [0; 10];
    assert_eq!(pairs[1].recv(&mut adapters[1], &mut buf), Ok(1));
    assert_eq!(adapters[1].reported(), Some(pairs[1].number()));
    thread::sleep(Duration::from_millis(10));
    assert!(pairs.iter().all(|pair| pair.broken().is_none()));
    release(pairs, &mut adapters);
}

#[test]
fn a_child_leaves_its_parents_datagrams_alone() {
    let Some(rxe) = rxe("children::a_child_leaves_its_parents_datagrams_alone") else {
        return;
    };
    let adapters = rxe.open();
    let [mut near, far] = adapters.each_ref().map(|a| a.datagrams().unwrap());
    let (here, there) = (near.locator(), far.locator());
    near.send(&there, b"before").unwrap();
    thread::sleep(Duration::from_millis(50));
    let mut inherited = ManuallyDrop::new(far);
    let status = in_child(|| {
        assert_eq!(inherited.receive(), None);
        assert!(inherited.is_broken() && inherited.arm().is_err());
        assert!(inherited.send(&here, b"child").is_err());
        assert!(adapters[1].datagrams().is_err());
        // SAFETY: the parent's one is another one. The child ends before anybody uses its own one again.
        unsafe { ManuallyDrop::drop(&mut inherited) };
    });
    assert!(is_well(status), "{status:?}");
    let mut far = ManuallyDrop::into_inner(inherited);
    assert_eq!(far.receive().map(|got| got.bytes), Some(b"before".to_vec()));
    for _ in 0..300 {
        near.send(&there, b"after").unwrap();
        let got = super::wait("a datagram", Duration::from_secs(1), || far.receive());
        assert_eq!(got.bytes, b"after");
    }
    assert_eq!(near.receive(), None);
}

#[test]
fn a_child_keeps_the_memory_that_it_has_where_a_region_was() {
    let Some(rxe) = rxe("children::a_child_keeps_the_memory_that_it_has_where_a_region_was") else {
        return;
    };
    let len = 1 << 20;
    let mut adapters = rxe.open();
    let region = adapters[0].register(len, Access::Remote).unwrap();
    let at = adapters[0].remote_key(region).addr as *mut libc::c_void;
    adapters[0].write(region, 0, b"parent");
    let mut inherited = adapters.map(ManuallyDrop::new);
    let status = in_child(|| {
        // SAFETY: a new mapping, at a place that is free.
        let own = unsafe {
            libc::mmap(
                at,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        assert!(ptr::eq(own, at), "the region is not there");
        let own = own.cast::<[u8; 6]>();
        // SAFETY: it is mapped, and ours.
        unsafe { own.write(*b"child!") };
        inherited[0].write(region, 0, b"parent");
        let mut read = [1; 6];
        inherited[0].read(region, 0, &mut read);
        assert_eq!(read, [0; 6]);
        drop_inherited(&mut inherited);
        // SAFETY: as above; a child in which it is not mapped any more dies here.
        assert_eq!(unsafe { own.read_volatile() }, *b"child!");
    });
    assert!(is_well(status), "{status:?}");
    // What the parent's region has now is not looked at: in user-mode Linux a child's mapping at that place is the parent's memory.
    inherited[0].invalidate(region);
    inherited[0].release(region);
    drop(inherited.map(ManuallyDrop::into_inner));
}
