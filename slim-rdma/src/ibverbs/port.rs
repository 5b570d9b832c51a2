//! An open port: what all queue pairs of it share.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use super::abi::{
    IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_GID_CHANGE, IBV_EVENT_LID_CHANGE,
    IBV_EVENT_PKEY_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, ibv_ah_attr, ibv_async_event, ibv_comp_channel,
    ibv_cq, ibv_global_route, ibv_pd, ibv_qp,
};
use super::devices::{DeviceList, NOT_FOUND, OpenDevice, PortInfo, gid_words};
use super::error::AdapterError;
use super::failed;
use super::library::Library;
use super::owner::PortOwner;
use crate::address::{PathMtu, QpNumber};
use crate::verbs::{AdapterEvent, VerbsError};

/// Routers on the way.
const HOPS: u8 = 64;

/// Which port is used, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSettings {
    /// Name of the adapter; `None`: the first one with a port that can be used.
    pub device: Option<String>,
    /// Number of the port; `None`: the first one that can be used.
    pub port: Option<u8>,
    /// Index of the global identifier; `None`: for RoCE an IPv4 address of RoCE v2 if there is one, for InfiniBand the first.
    pub gid_index: Option<u8>,
    /// Key of the partition; `None`: the first of the port's table.
    pub partition: Option<u16>,
    /// The largest packet; `None`: what the port carries.
    pub mtu: Option<PathMtu>,
    /// Time limit of an acknowledgement: 4.096 µs times 2 to the power of this, 1 to 31.
    pub timeout: u8,
    /// Attempts after the first, 0 to 6. Some adapters take 7 for no limit.
    pub retries: u8,
    /// Attempts if the peer has posted no receive, 0 to 6. The peer always has.
    pub not_ready_retries: u8,
    /// Service level of InfiniBand, or priority of Ethernet.
    pub service_level: u8,
    /// Traffic class, which RoCE v2 has in the IP header.
    pub traffic_class: u8,
}

impl Default for PortSettings {
    fn default() -> Self {
        PortSettings {
            device: None,
            port: None,
            gid_index: None,
            partition: None,
            mtu: None,
            timeout: 14,
            retries: 3,
            not_ready_retries: 3,
            service_level: 0,
            traffic_class: 0,
        }
    }
}

impl PortSettings {
    fn check(&self) -> Result<(), AdapterError> {
        for (right, what) in [
            (
                (1..=31).contains(&self.timeout),
                "the timeout's exponent must be 1 to 31",
            ),
            (self.retries <= 6, "the number of retries must be 0 to 6"),
            (
                self.not_ready_retries <= 6,
                "the number of retries must be 0 to 6",
            ),
            (
                self.service_level <= 15,
                "the service level must be 0 to 15",
            ),
        ] {
            if !right {
                return Err(AdapterError::Setting(what));
            }
        }
        Ok(())
    }
}

/// The address of the port, as it was chosen.
#[derive(Clone, Copy, Debug)]
pub(super) struct PortAddress {
    pub(super) number: u8,
    pub(super) ethernet: bool,
    pub(super) gid: [u8; 16],
    pub(super) gid_index: u8,
    pub(super) lid: u16,
    pub(super) partition: u16,
    pub(super) partition_index: u16,
    pub(super) mtu: PathMtu,
}

impl PortAddress {
    /// The address of a port, or why there is none.
    fn choose(port: &PortInfo, settings: &PortSettings) -> Result<Self, String> {
        if !port.active {
            return Err("no link".into());
        }
        let gid = match settings.gid_index {
            Some(index) => {
                let mut gids = port.gids.iter();
                let found = gids.find(|gid| gid.index == index.into()).copied();
                found.ok_or_else(|| format!("no global identifier {index}"))?
            }
            None => port.preferred_gid().ok_or("no address of RoCE v2")?,
        };
        let gid_index = u8::try_from(gid.index);
        let gid_index = gid_index.map_err(|_| "the index of its global identifier is above 255")?;
        let partition = match settings.partition {
            // The highest bit tells full members of a partition from limited ones.
            Some(key) => {
                let mut keys = port.partitions.iter();
                let found = keys.find(|(_, k)| (k ^ key) & 0x7fff == 0);
                *found.ok_or_else(|| format!("no partition {key:#06x}"))?
            }
            None => *port.partitions.first().ok_or("no partition")?,
        };
        Ok(PortAddress {
            number: port.number,
            ethernet: port.ethernet,
            gid: gid.gid,
            gid_index,
            lid: port.lid,
            partition: partition.1,
            partition_index: partition.0,
            mtu: port.mtu.min(settings.mtu.unwrap_or(PathMtu::Mtu4096)),
        })
    }

    /// Whether the port still has this address. A partition key that cannot be read, because the process has no descriptors left,
    /// does not count as another one.
    fn is_of(&self, port: &PortInfo, device: &OpenDevice) -> bool {
        let index = u32::from(self.gid_index);
        let partition = device.partition(self.number, self.partition_index);
        port.lid == self.lid
            && partition.is_none_or(|key| key == self.partition)
            && port
                .gids
                .iter()
                .any(|gid| gid.index == index && gid.gid == self.gid)
    }
}

/// An open port. Its functions may be called from any thread.
pub(super) struct OpenPort {
    pub(super) name: String,
    pub(super) settings: PortSettings,
    pub(super) address: PortAddress,
    pub(super) pd: *mut ibv_pd,
    pub(super) channel: *mut ibv_comp_channel,
    removed: AtomicBool,
    owner: PortOwner,
    /// Closed at the end, by its owner only.
    pub(super) device: ManuallyDrop<OpenDevice>,
}

// SAFETY: libibverbs may be called from any thread, for any object; the pointers are changed by nobody.
unsafe impl Send for OpenPort {}
// SAFETY: as above.
unsafe impl Sync for OpenPort {}

impl Drop for OpenPort {
    fn drop(&mut self) {
        if !self.is_own() {
            return;
        }
        // SAFETY: all queue pairs, completion queues and regions hold the port, so there are none any more. The device is closed afterwards,
        // once, and not used any more.
        unsafe {
            (self.device.library.ibv_destroy_comp_channel)(self.channel);
            (self.device.library.ibv_dealloc_pd)(self.pd);
            ManuallyDrop::drop(&mut self.device);
        }
    }
}

impl OpenPort {
    pub(super) fn open(settings: &PortSettings) -> Result<Self, AdapterError> {
        settings.check()?;
        let library = Library::get()?;
        let list = DeviceList::new(library)?;
        let mut refused = Vec::new();
        let is_wanted =
            |name: &String| settings.device.as_ref().is_none_or(|wanted| wanted == name);
        for device in list.all() {
            let name = list.name(device);
            if !is_wanted(&name) {
                continue;
            }
            if let Some(why) = list.unfit(device) {
                refused.push(format!("{name}: {why}"));
                continue;
            }
            let open = OpenDevice::open(library, device);
            let (device, ports) = match open.and_then(|open| open.ports().map(|p| (open, p))) {
                Ok(found) => found,
                Err(e) => {
                    refused.push(format!("{name}: {e}"));
                    continue;
                }
            };
            for port in ports {
                if settings.port.is_some_and(|wanted| wanted != port.number) {
                    continue;
                }
                match PortAddress::choose(&port, settings) {
                    Ok(address) => return Self::with(device, name, settings, address),
                    Err(why) => refused.push(format!("{name} port {}: {why}", port.number)),
                }
            }
        }
        for name in list.not_found().into_iter().filter(is_wanted) {
            refused.push(format!("{name}: {NOT_FOUND}"));
        }
        let wanted = match &settings.device {
            Some(name) => format!("this host has no adapter {name} with a port that can be used"),
            None => "this host has no adapter with a port that can be used".to_owned(),
        };
        let why = match refused.is_empty() {
            true => wanted,
            false => format!("{wanted} ({})", refused.join("; ")),
        };
        Err(AdapterError::NoAdapter(why))
    }

    fn with(
        device: OpenDevice,
        name: String,
        settings: &PortSettings,
        address: PortAddress,
    ) -> Result<Self, AdapterError> {
        let library = device.library;
        let call = |e| AdapterError::Call(name.clone(), e);
        let owner = PortOwner::new().map_err(call)?;
        // SAFETY: the device is open.
        let pd = unsafe { (library.ibv_alloc_pd)(device.context) };
        if pd.is_null() {
            return Err(call(failed("ibv_alloc_pd")));
        }
        // SAFETY: the device is open.
        let channel = unsafe { (library.ibv_create_comp_channel)(device.context) };
        if channel.is_null() {
            let e = failed("ibv_create_comp_channel");
            // SAFETY: nothing was made of the protection domain.
            unsafe { (library.ibv_dealloc_pd)(pd) };
            return Err(call(e));
        }
        let port = OpenPort {
            name: name.clone(),
            settings: settings.clone(),
            address,
            pd,
            channel,
            removed: AtomicBool::new(false),
            owner,
            device: ManuallyDrop::new(device),
        };
        for fd in [port.completions(), port.events()] {
            set_nonblocking(fd).map_err(call)?;
        }
        Ok(port)
    }

    /// Whether this process has opened it. A child of a fork has not: the kernel's objects are the parent's, and what the child destroyed
    /// or took would be missing there. Nor is the memory of a region in a child; something else may be at its address.
    #[inline]
    pub(super) fn is_own(&self) -> bool {
        self.owner.is_here()
    }

    /// An error for a child of a fork.
    #[inline]
    pub(super) fn check(&self) -> Result<(), VerbsError> {
        match self.is_own() {
            true => Ok(()),
            false => Err(VerbsError::new("port of the parent process", libc::EPERM)),
        }
    }

    /// The path to the port with this address.
    pub(super) fn path(
        &self,
        gid: [u8; 16],
        lid: u16,
        partition: u16,
    ) -> Result<ibv_ah_attr, VerbsError> {
        let own = &self.address;
        let of_no_use = |what| Err(VerbsError::new(what, libc::EINVAL));
        if (own.partition ^ partition) & 0x7fff != 0 {
            return of_no_use("partition of the peer");
        }
        if (lid == 0) != own.ethernet {
            return of_no_use("kind of the peer's port");
        }
        Ok(ibv_ah_attr {
            grh: ibv_global_route {
                dgid: gid_words(gid),
                flow_label: 0,
                sgid_index: own.gid_index,
                hop_limit: HOPS,
                traffic_class: self.settings.traffic_class,
            },
            dlid: lid,
            sl: self.settings.service_level,
            src_path_bits: 0,
            static_rate: 0,
            // InfiniBand needs the global identifier between two subnets only: its first half is the subnet.
            is_global: u8::from(own.ethernet || gid[..8] != own.gid[..8]),
            port_num: own.number,
        })
    }

    /// Is readable when a completion is reported.
    pub(super) fn completions(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live as long as `self`.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }

    /// Is readable when the adapter has an event.
    pub(super) fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the device is open as long as `self` lives, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw((*self.device.context).async_fd) }
    }

    /// A queue pair that has a completion.
    pub(super) fn reported(&self) -> Option<QpNumber> {
        self.check().ok()?;
        let (mut cq, mut context) = (ptr::null_mut::<ibv_cq>(), ptr::null_mut());
        let library = self.device.library;
        // SAFETY: the channel lives. A completion queue is not destroyed between the two calls: its destruction waits for the second one.
        unsafe {
            if (library.ibv_get_cq_event)(self.channel, &mut cq, &mut context) != 0 {
                return None;
            }
            (library.ibv_ack_cq_events)(cq, 1);
        }
        // The number is no pointer: the context of a completion queue is the number of its queue pair.
        Some(QpNumber(context as usize as u32))
    }

    /// The next event that is of interest.
    pub(super) fn event(&self) -> Option<AdapterEvent> {
        self.check().ok()?;
        let library = self.device.library;
        loop {
            let mut event = ibv_async_event {
                element: ptr::null_mut(),
                event_type: 0,
            };
            // SAFETY: the device is open, and the structure has the layout of the header.
            let status = unsafe { (library.ibv_get_async_event)(self.device.context, &mut event) };
            if status != 0 {
                let gone = io::Error::last_os_error().raw_os_error() == Some(libc::EIO);
                let news = gone && !self.removed.swap(true, Ordering::Relaxed);
                return news.then_some(AdapterEvent::Removed);
            }
            let found = self.meaning(&event);
            // SAFETY: the event was just taken, and is acknowledged once.
            unsafe { (library.ibv_ack_async_event)(&mut event) };
            if found.is_some() {
                return found;
            }
        }
    }

    /// What an event that is not acknowledged yet means for this port.
    fn meaning(&self, event: &ibv_async_event) -> Option<AdapterEvent> {
        // SAFETY: the first bytes of the union are its integer.
        let port = || unsafe { *(&raw const event.element).cast::<i32>() };
        let own_port = || port() == i32::from(self.address.number);
        match event.event_type {
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => {
                let qp = event.element.cast::<ibv_qp>();
                // SAFETY: the queue pair is not destroyed before its event is acknowledged.
                let number = unsafe { (*qp).qp_num };
                Some(AdapterEvent::PairFailed(QpNumber(number)))
            }
            IBV_EVENT_CQ_ERR => {
                let cq = event.element.cast::<ibv_cq>();
                // SAFETY: the completion queue is not destroyed before its event is acknowledged.
                let context = unsafe { (*cq).cq_context };
                Some(AdapterEvent::PairFailed(QpNumber(context as usize as u32)))
            }
            IBV_EVENT_DEVICE_FATAL => {
                self.removed.store(true, Ordering::Relaxed);
                Some(AdapterEvent::Removed)
            }
            IBV_EVENT_PORT_ERR if own_port() => Some(AdapterEvent::PortDown),
            IBV_EVENT_PORT_ACTIVE
            | IBV_EVENT_LID_CHANGE
            | IBV_EVENT_PKEY_CHANGE
            | IBV_EVENT_GID_CHANGE
                if own_port() =>
            {
                // With another address the port is of no use to those who know the old one.
                match self.is_up() {
                    true => Some(AdapterEvent::PortUp),
                    false => Some(AdapterEvent::PortDown),
                }
            }
            _ => None,
        }
    }

    /// Whether the port has a link, and the address that was chosen.
    pub(super) fn is_up(&self) -> bool {
        let port = self.device.port(self.address.number);
        port.is_ok_and(|port| port.active && self.address.is_of(&port, &self.device))
    }
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), VerbsError> {
    let fd = fd.as_raw_fd();
    // SAFETY: the descriptor is open.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(failed("fcntl"));
    }
    Ok(())
}
