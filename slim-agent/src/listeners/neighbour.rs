//! Another process of this host, and the connection to it.

use std::io;
use std::rc::Rc;

use slim_sys::OwnFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::kernel::readiness;
use crate::kernel::sys;
use crate::listeners::notes::{LONGEST, Note};

/// A connection to another process. It ends with that process.
pub(crate) struct Neighbour {
    fd: AsyncFd<OwnFd>,
}

impl Neighbour {
    /// The user of the process at its other end.
    pub(crate) fn user(&self) -> Option<libc::uid_t> {
        sys::peer_user(self.fd.get_ref().raw())
    }

    pub(crate) fn new(fd: OwnFd) -> io::Result<Rc<Self>> {
        let fd = readiness::watch(fd, Interest::READABLE)?;
        Ok(Rc::new(Neighbour { fd }))
    }

    /// Sends a note. A note that cannot be sent now is lost, as any HELLO may be.
    pub(crate) fn tell(&self, note: &Note) {
        let _ = sys::send(self.fd.get_ref().raw(), &note.encode());
    }

    /// The next note and the sender's secret; `None` at the end.
    pub(crate) async fn next(&self) -> Option<(Note, [u8; 16])> {
        let mut buf = [0; LONGEST + 1];
        loop {
            let mut guard = self.fd.readable().await.ok()?;
            match sys::recv(self.fd.get_ref().raw(), &mut buf) {
                Ok(0) => return None,
                Ok(n) => {
                    if let Some(note) = Note::decode(buf.get(..n).unwrap_or_default()) {
                        return Some(note);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
                Err(_) => return None,
            }
        }
    }
}
