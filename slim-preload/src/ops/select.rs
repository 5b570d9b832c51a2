//! select and pselect: readiness of flows, see [`super::poll`].

use super::limit::{Given, Wait};
use super::poll::{Early, hidden, is_away, is_broken, may_wait, until_true};
use super::sockets;
use crate::descriptors;
use crate::sleep::with_alarm;
use crate::sys;
use crate::table;
use crate::transport::swapped;
use libc::{c_int, fd_set};
use smallvec::{SmallVec, smallvec};
use std::cell::Cell;
use std::time::Duration;

/// A copy of one set of a `select`. Up to the size of an `fd_set` it needs no heap memory.
type Set = SmallVec<[u8; libc::FD_SETSIZE / 8]>;

/// The three sets of a `select`.
#[derive(Clone, Copy)]
pub struct Sets {
    /// The number of descriptor numbers that they cover.
    pub count: c_int,
    /// The read, write and exception sets; each may be null.
    pub sets: [*mut fd_set; 3],
}

impl Sets {
    fn bytes(&self) -> usize {
        // The kernel accesses whole longs, so the application has allocated as much.
        (self.count.max(0) as usize).div_ceil(64) * 8
    }

    /// Copies of the sets; `None` when a pointer is bad.
    fn save(&self) -> Option<[Set; 3]> {
        let copy = |s: *mut fd_set| match s.is_null() {
            true => Some(Set::new()),
            false => {
                let mut set: Set = smallvec![0; self.bytes()];
                sys::read_memory(s.cast(), &mut set).then_some(set)
            }
        };
        let [read, write, except] = self.sets;
        Some([copy(read)?, copy(write)?, copy(except)?])
    }

    /// Whether `is` holds for any number in the saved sets.
    fn any(&self, saved: &[Set; 3], mut is: impl FnMut(c_int) -> bool) -> bool {
        (0..self.count).any(|fd| {
            let set = |bytes: &Set| {
                bytes
                    .get(fd as usize / 8)
                    .is_some_and(|b| b >> (fd % 8) & 1 == 1)
            };
            saved.iter().any(set) && is(fd)
        })
    }

    /// Runs `f` on copies with `alarm` in the read set, and copies the answer back without the alarm. Sets `has_rung` if the
    /// alarm was signalled.
    fn with(&self, alarm: c_int, has_rung: &Cell<bool>, f: impl FnOnce(Sets) -> c_int) -> c_int {
        let count = self.count.max(alarm + 1);
        let bytes = (count as usize).div_ceil(64) * 8;
        has_rung.set(false);
        let Some(copies) = self.save() else {
            return f(*self);
        };
        let mut copies = copies.map(|mut set| {
            set.resize(bytes, 0);
            set
        });
        let (byte, bit) = (alarm as usize / 8, 1 << (alarm % 8));
        copies[0][byte] |= bit;
        let mut at = |i: usize| copies[i].as_mut_ptr().cast::<fd_set>();
        let absent = |i: usize| i > 0 && self.sets[i].is_null();
        let sets = [0, 1, 2].map(|i| {
            if absent(i) {
                std::ptr::null_mut()
            } else {
                at(i)
            }
        });
        let n = f(Sets { count, sets });
        let rang = n > 0 && copies[0][byte] & bit != 0;
        has_rung.set(rang);
        copies[0][byte] &= !bit;
        if n >= 0 {
            let own = self.bytes();
            self.restore(&copies.map(|mut set| {
                set.truncate(own);
                set
            }));
        }
        n - c_int::from(rang)
    }

    /// Removes the numbers whose transport is away from the sets, which equal `saved`; true if there are any.
    fn leave_out(&self, saved: &[Set; 3]) -> bool {
        let mut away = false;
        self.any(saved, |fd| {
            if is_away(fd) {
                away = true;
                for set in self.sets.iter().filter(|set| !set.is_null()) {
                    // SAFETY: the sets are as long as their saved copies, and the kernel is about to write to them.
                    unsafe { *set.cast::<u8>().add(fd as usize / 8) &= !(1 << (fd % 8)) };
                }
            }
            false
        });
        away
    }

    /// The numbers in the sets, after the kernel's answer.
    fn ready(&self) -> impl Iterator<Item = c_int> + use<> {
        let this = *self;
        (0..this.count).filter(move |fd| (0..3).any(|set| this.has(set, *fd)))
    }

    /// Whether the number is in one of the sets (0: read, 1: write, 2: exception), after the kernel's answer.
    fn has(&self, set: usize, fd: c_int) -> bool {
        let set = self.sets[set];
        // SAFETY: the kernel has just written `count` bits there.
        !set.is_null() && unsafe { *set.cast::<u8>().add(fd as usize / 8) } >> (fd % 8) & 1 == 1
    }

    /// Empties the sets: nothing is ready.
    fn clear(&self) {
        self.restore(&[(); 3].map(|()| smallvec![0; self.bytes()]));
    }

    fn restore(&self, saved: &[Set; 3]) {
        for (s, bytes) in self.sets.iter().zip(saved) {
            if !s.is_null() {
                // SAFETY: as in `save`.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), s.cast::<u8>(), bytes.len())
                };
            }
        }
    }
}

/// Only calls with a larger count are limited to the size of the descriptor table beforehand.
const FEW: c_int = 4096;

/// `select` and `pselect`; `real` asks the kernel about the sets it is given.
pub fn select(sets: Sets, given: Given, real: impl Fn(Sets, Wait) -> c_int) -> c_int {
    if !table::any() {
        return real(sets, Wait::AsGiven);
    }
    let before = sys::errno();
    // The kernel ignores numbers beyond its descriptor table, which SLIM's descriptors have made larger.
    let within = || {
        let count = sets.count.min(sys::keep_errno(descriptors::table_size));
        Sets { count, ..sets }
    };
    if sets.count > FEW {
        return select_all(within(), given, &real);
    }
    let n = select_all(sets, given, &real);
    if n == 0 {
        super::came_back_empty();
    }
    if n < 0 && sys::errno() == libc::EBADF && sets.count > sys::TABLE_MIN {
        let fewer = within();
        if sets.count > fewer.count {
            sys::set_errno(before);
            return select_all(fewer, given, &real);
        }
    }
    n
}

/// `select` for these sets. A set has no bit for errors, so the flows in an answer are checked for errors one by one.
fn select_all(sets: Sets, given: Given, real: &impl Fn(Sets, Wait) -> c_int) -> c_int {
    let limit = given.read();
    let saved = limit.and_then(|_| sys::keep_errno(|| sets.save()));
    let (Some(saved), Some(mut limit)) = (saved, limit) else {
        return real(sets, Wait::AsGiven);
    };
    if table::any_inherited_listener() {
        sets.any(&saved, |fd| {
            sockets::waits_on(fd);
            false
        });
    }
    let flows = sets.any(&saved, table::is_flow);
    let now = Wait::For(Some(Duration::ZERO));
    let sleeps = limit.sleeps() && flows;
    if flows {
        limit.begin();
    }
    if sleeps || sets.any(&saved, is_away) {
        // First ask without waiting, so that the kernel has written to the sets before we do.
        let n = real(sets, if sleeps { now } else { Wait::AsGiven });
        if n < 0 {
            return n;
        }
        sets.restore(&saved);
    }
    let first = Cell::new(true);
    let early = Early::default();
    let ask = |wait: Wait| {
        if !first.replace(false) {
            sets.restore(&saved);
        }
        if !sleeps {
            if flows {
                sets.leave_out(&saved);
            }
            return real(sets, wait);
        }
        with_alarm(|alarm| {
            let away = sets.leave_out(&saved);
            early.cut_short.set(away && alarm.is_none());
            match alarm {
                Some(alarm) => sets.with(alarm, &early.rang, |sets| real(sets, wait)),
                None => real(sets, wait.unless(&early.cut_short, limit)),
            }
        })
    };
    let suspicious = || {
        sys::keep_errno(|| {
            sets.ready()
                .filter(|fd| {
                    let waits = |flow| sets.has(0, *fd) && may_wait(flow, *fd);
                    table::flow(*fd).is_some_and(|flow| sys::has_ended(*fd) || waits(flow))
                })
                .collect::<SmallVec<[c_int; 16]>>()
        })
    };
    let any = |is: &dyn Fn(&'static crate::flow::Flow, c_int) -> bool| {
        let mut found = false;
        for fd in suspicious() {
            found |= table::flow(fd).is_some_and(|flow| sys::keep_errno(|| is(flow, fd)));
        }
        found
    };
    until_true(
        limit,
        || ask(Wait::AsGiven),
        ask,
        |n| match n {
            0 => !early.has_come(),
            _ => !flows || suspicious().is_empty(),
        },
        |n, swaps| {
            let swapped = swapped(swaps);
            if !any(&|flow, fd| hidden(flow, fd, swaps)) && !swapped {
                return n;
            }
            // The numbers may have been ready because of files that have been replaced: ask once more, without waiting.
            sets.restore(&saved);
            sets.leave_out(&saved);
            let n = real(sets, now).max(0);
            if n > 0 && !any(&is_broken) {
                return n;
            }
            sets.clear();
            0
        },
    )
}
