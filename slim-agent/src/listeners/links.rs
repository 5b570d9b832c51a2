//! Connections between the processes that accept at one address: `docs/PROTOCOL.md`, section "Listeners shared by several
//! processes".

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use slim_sys::OwnFd;
use tokio::io::unix::AsyncFd;
use tokio::task::{AbortHandle, JoinSet, yield_now};

use crate::kernel::sys;
use crate::kernel::task;
use crate::listeners::neighbour::Neighbour;
use crate::listeners::notes::{Note, lineage};
use crate::shared::Shared;

/// Most other processes that are connected at a time.
const LINKS: usize = 256;

/// Another process's connection to the owner.
struct Guest {
    task: AbortHandle,
    /// Any process on this host can connect; this one belongs to our user, or knows the secret.
    believed: Rc<Cell<bool>>,
}

/// In the owner: accepts connections of other processes. They all end with this task.
pub(crate) async fn serve(addr: SocketAddr, listener: AsyncFd<OwnFd>, shared: Rc<Shared>) {
    let mut links = JoinSet::new();
    let mut guests: Vec<Guest> = Vec::new();
    while let Ok(mut guard) = listener.readable().await {
        match sys::accept_local(listener.get_ref().raw()) {
            Ok(fd) => {
                while links.try_join_next().is_some() {}
                guests.retain(|guest| !guest.task.is_finished());
                if guests.len() >= LINKS
                    && let Some(stranger) = guests.iter().position(|g| !g.believed.get())
                {
                    guests.remove(stranger).task.abort();
                }
                if guests.len() < LINKS
                    && let Ok(link) = Neighbour::new(fd)
                {
                    let believed = Rc::new(Cell::new(false));
                    let work = hear_claims(addr, link, believed.clone(), shared.clone());
                    let task = task::spawn_on(&mut links, work);
                    guests.push(Guest { task, believed });
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
            // No descriptor is left, most likely. The connection waits until the next one arrives.
            Err(_) => guard.clear_ready(),
        }
        drop(guard);
        yield_now().await;
    }
}

/// In the owner: carries out what another process asks for.
async fn hear_claims(
    addr: SocketAddr,
    link: Rc<Neighbour>,
    believed: Rc<Cell<bool>>,
    shared: Rc<Shared>,
) {
    shared.with(|d, _| d.claims.arrived(addr, &link));
    let relative = link.user() == Some(slim_sys::user());
    while let Some((note, secret)) = link.next().await {
        if let Note::Release(_) = note {
            let gave = shared.with(|d, _| d.may_have(link.user()) && d.give_way(addr));
            // The link ends when the control socket is closed. It ends at once if the process cannot have the port.
            match gave {
                true => continue,
                false => break,
            }
        }
        if !relative && secret != lineage() {
            break;
        }
        believed.set(true);
        shared.with(|d, now| match note {
            Note::Claim(local, remote, which) => {
                d.endpoint.share_listeners();
                d.endpoint
                    .note_connection_age(now, (local, remote), which.age);
                d.claims
                    .claim(now, (local, remote), which.connection, link.clone());
                while let Some(hello) = d.endpoint.take_pending(now, local, remote) {
                    d.claims.hand_over((local, remote), hello);
                }
            }
            Note::Drop(local, remote) => d.claims.unclaim(now, (local, remote), &link),
            Note::Hello(..) | Note::Release(_) | Note::Given(_) => {}
        });
    }
    shared.with(|d, _| d.claims.left(&link));
}

/// In a process that is not the owner: handles what the owner of `addr` sends.
pub(crate) async fn hear_owner(addr: SocketAddr, link: Rc<Neighbour>, shared: Rc<Shared>) {
    while let Some((note, _)) = link.next().await {
        shared.with(|d, now| match note {
            Note::Hello(from, local, data) => d.take(now, from, local, &data),
            Note::Given(addr) => d.never_again(addr),
            Note::Claim(..) | Note::Drop(..) | Note::Release(_) => {}
        });
    }
    shared.with(|d, _| d.owner_lost(addr, &link));
}
