//! A queue into which a signal handler may put an item, whatever it has interrupted.
//!
//! Putting an item in never waits, not even for another thread that is putting one in; in a queue with numbered slots
//! it would. The items form a linked list, the newest first. The consumer takes the whole list, and reverses it.

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The producers' end, for any thread.
pub(crate) struct Queue<T> {
    /// The newest item.
    last: AtomicPtr<QueueNode<T>>,
}

struct QueueNode<T> {
    item: T,
    other: *mut QueueNode<T>,
}

/// The consumer's end: items that have been taken out of the queue, for one thread.
pub(crate) struct Taken<T> {
    next: Cell<*mut QueueNode<T>>,
}

// SAFETY: items only move through: put in by one thread, taken out by another.
unsafe impl<T: Send> Send for Queue<T> {}
// SAFETY: as above; no two threads ever have the same node.
unsafe impl<T: Send> Sync for Queue<T> {}
// SAFETY: it owns its nodes, and they own their items.
unsafe impl<T: Send> Send for Taken<T> {}

impl<T> Queue<T> {
    pub(crate) const fn new() -> Self {
        Queue {
            last: AtomicPtr::new(null_mut()),
        }
    }

    /// Puts an item in.
    pub(crate) fn put(&self, item: T) {
        let node = Box::into_raw(Box::new(QueueNode {
            item,
            other: null_mut(),
        }));
        let mut last = self.last.load(Ordering::Relaxed);
        loop {
            // SAFETY: no other thread has the node before it is exchanged for `last`.
            unsafe { (*node).other = last };
            let put =
                self.last
                    .compare_exchange_weak(last, node, Ordering::Release, Ordering::Relaxed);
            match put {
                Ok(_) => return,
                Err(now) => last = now,
            }
        }
    }
}

impl<T> Taken<T> {
    pub(crate) const fn new() -> Self {
        Taken {
            next: Cell::new(null_mut()),
        }
    }

    /// The next item of the queue, if it has one. A queue must always be used with the same `Taken`.
    pub(crate) fn next(&self, queue: &Queue<T>) -> Option<T> {
        self.pop().or_else(|| {
            let mut last = queue.last.swap(null_mut(), Ordering::Acquire);
            while !last.is_null() {
                // SAFETY: the swap made these nodes ours alone.
                let before = unsafe { std::mem::replace(&mut (*last).other, self.next.get()) };
                self.next.set(last);
                last = before;
            }
            self.pop()
        })
    }

    fn pop(&self) -> Option<T> {
        let next = self.next.get();
        if next.is_null() {
            return None;
        }
        // SAFETY: a node of ours alone, made from a box by `put`; nothing points to it from here on.
        let node = unsafe { Box::from_raw(next) };
        self.next.set(node.other);
        Some(node.item)
    }
}

impl<T> Drop for Queue<T> {
    fn drop(&mut self) {
        let rest = Taken::new();
        while rest.next(self).is_some() {}
    }
}

impl<T> Drop for Taken<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn the_items_of_each_thread_come_out_once_and_in_order() {
        const THREADS: usize = 4;
        const ITEMS: usize = 20_000;
        let queue = Queue::new();
        let taken = Taken::new();
        let mut next = [0; THREADS];
        thread::scope(|scope| {
            for t in 0..THREADS {
                let queue = &queue;
                scope.spawn(move || (0..ITEMS).for_each(|i| queue.put((t, Box::new(i)))));
            }
            while next != [ITEMS; THREADS] {
                match taken.next(&queue) {
                    Some((t, i)) => {
                        assert_eq!(*i, next[t]);
                        next[t] += 1;
                    }
                    None => thread::yield_now(),
                }
            }
        });
        assert!(taken.next(&queue).is_none());
    }

    #[test]
    fn items_left_in_the_queue_are_dropped() {
        let item = Arc::new(());
        let (queue, taken) = (Queue::new(), Taken::new());
        for _ in 0..3 {
            queue.put(item.clone());
        }
        drop(taken.next(&queue));
        queue.put(item.clone());
        assert_eq!(Arc::strong_count(&item), 4);
        drop((queue, taken));
        assert_eq!(Arc::strong_count(&item), 1);
    }
}
