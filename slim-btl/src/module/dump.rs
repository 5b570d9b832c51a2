//! The state of all connections as text, for a debugger or a program that calls `btl_dump`.

use super::BtlModule;

impl BtlModule {
    /// Reports the state of all peers and flows. Waits for no lock, so it may be called while another thread is stopped.
    pub fn dump(&self) {
        let mut lines = vec![format!("state of {:?}, {:?}", self, self.deferred)];
        match self.peers.try_lock() {
            Ok(peers) => lines.extend(peers.values().map(|peer| format!("{peer:?}"))),
            Err(_) => lines.push("the list of peers is in use".into()),
        }
        match self.progress.try_lock() {
            Ok(state) => lines.extend(state.links.iter().map(|(id, link)| {
                let stats = link.flow.as_ref().map(|flow| flow.stats());
                format!("flow {id}: {stats:?} {}", link.summary())
            })),
            Err(_) => lines.push("progress is being made".into()),
        }
        for line in lines {
            self.log(0, || line);
        }
    }
}
