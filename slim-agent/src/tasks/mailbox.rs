//! A queue between two tasks of the agent thread.
//!
//! Each resume connection has one, for a few orders, and thousands of connections may be made at once. A queue between
//! threads would cost more time and memory than the orders do.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// The sending end. Dropping it ends the queue once it is empty.
pub(crate) struct Sender<T>(Rc<MailboxQueue<T>>);

/// The receiving end: items come out in order.
pub(crate) struct Receiver<T>(Rc<MailboxQueue<T>>);

/// The queue is empty, and no item will come.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended;

struct MailboxQueue<T> {
    items: RefCell<VecDeque<T>>,
    waker: Cell<Option<Waker>>,
    /// Both ends exist.
    open: Cell<bool>,
}

/// A new queue.
pub(crate) fn mailbox<T>() -> (Sender<T>, Receiver<T>) {
    let queue = Rc::new(MailboxQueue {
        items: RefCell::default(),
        waker: Cell::default(),
        open: Cell::new(true),
    });
    (Sender(queue.clone()), Receiver(queue))
}

impl<T> Sender<T> {
    /// Puts an item in; false if the receiving end is gone.
    pub(crate) fn send(&self, item: T) -> bool {
        if self.0.open.get() {
            self.0.items.borrow_mut().push_back(item);
            self.0.wake();
        }
        self.0.open.get()
    }
}

impl<T> Receiver<T> {
    /// Whether the sending end is gone. There may be items left.
    pub(crate) fn is_closed(&self) -> bool {
        !self.0.open.get()
    }

    /// The next item, or `None` if there is none yet. Drops the stored waker: the caller is awake, and need not be
    /// woken for items that come before it waits.
    pub(crate) fn try_recv(&self) -> Result<Option<T>, Ended> {
        drop(self.0.waker.take());
        match self.0.items.borrow_mut().pop_front() {
            None if self.is_closed() => Err(Ended),
            item => Ok(item),
        }
    }

    /// Waits for the next item; `None` if no item can come. Cancelling the wait loses no item.
    pub(crate) async fn recv(&self) -> Option<T> {
        poll_fn(|context| match self.try_recv() {
            Ok(Some(item)) => Poll::Ready(Some(item)),
            Ok(None) => {
                self.0.waker.set(Some(context.waker().clone()));
                Poll::Pending
            }
            Err(Ended) => Poll::Ready(None),
        })
        .await
    }
}

impl<T> MailboxQueue<T> {
    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.open.set(false);
        self.0.wake();
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.open.set(false);
        // Dropped after the borrow has ended, because the destructors of items may do anything.
        let rest = self.0.items.take();
        drop(rest);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::{Context, Wake};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicU32);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn items_come_out_in_order_and_then_the_end() {
        let (sender, receiver) = mailbox();
        assert_eq!(receiver.try_recv(), Ok(None));
        assert!(sender.send(1) && sender.send(2));
        drop(sender);
        assert!(receiver.is_closed());
        assert_eq!(receiver.try_recv(), Ok(Some(1)));
        assert_eq!(receiver.try_recv(), Ok(Some(2)));
        assert_eq!(receiver.try_recv(), Err(Ended));
    }

    #[test]
    fn a_waiting_receiver_is_woken_by_an_item_and_by_the_end() {
        let woken = Arc::new(Woken::default());
        let waker = woken.clone().into();
        let mut context = Context::from_waker(&waker);
        let (sender, receiver) = mailbox();
        let woken = || woken.0.load(Ordering::Relaxed);
        let mut next = pin!(receiver.recv());
        assert_eq!(next.as_mut().poll(&mut context), Poll::Pending);
        assert_eq!(woken(), 0);
        assert!(sender.send(7));
        assert_eq!(woken(), 1);
        assert_eq!(next.as_mut().poll(&mut context), Poll::Ready(Some(7)));
        let mut next = pin!(receiver.recv());
        assert_eq!(next.as_mut().poll(&mut context), Poll::Pending);
        drop(sender);
        assert_eq!(woken(), 2);
        assert_eq!(next.as_mut().poll(&mut context), Poll::Ready(None));
    }

    #[test]
    fn sending_fails_after_the_receiver_is_dropped() {
        let (sender, receiver) = mailbox();
        let item = Rc::new(());
        assert!(sender.send(item.clone()));
        drop(receiver);
        assert!(!sender.send(item.clone()));
        assert_eq!(Rc::strong_count(&item), 1);
    }
}
