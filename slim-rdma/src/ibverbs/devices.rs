//! What adapters a host has, and which address of a port is used.

use std::ffi::CStr;

use super::abi::{
    IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET,
    IBV_PORT_ACTIVE, IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP, ibv_context, ibv_device,
    ibv_device_attr, ibv_gid_entry, ibv_port_attr,
};
use super::error::AdapterError;
use super::library::Library;
use super::{failed, result};
use crate::address::PathMtu;
use crate::verbs::VerbsError;

/// Most entries of a table of GIDs, or of partition keys, that are looked at.
const MOST_ENTRIES: usize = 1024;
/// Where the kernel lists its adapters.
const KERNEL_LIST: &str = "/sys/class/infiniband";
/// Why an adapter that only the kernel has cannot be used.
pub(super) const NOT_FOUND: &str =
    "libibverbs does not find it: no driver (Debian: ibverbs-providers), or it is being deleted";

/// An adapter of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, as `ibv_devices` and `rdma link` show it.
    pub name: String,
    /// It cannot be used: why.
    pub unfit: Option<&'static str>,
    /// Its ports. Empty if it is unfit or cannot be opened.
    pub ports: Vec<PortInfo>,
}

/// A port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// It has a link, and can carry data.
    pub active: bool,
    /// It is RoCE, and not InfiniBand.
    pub ethernet: bool,
    /// Its address in the InfiniBand subnet; 0 for RoCE.
    pub lid: u16,
    /// The largest packet that it carries.
    pub mtu: PathMtu,
    /// Its global identifiers.
    pub gids: Vec<GidInfo>,
    /// Its partition keys, with their indices.
    pub partitions: Vec<(u16, u16)>,
}

/// A global identifier of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidInfo {
    /// Its index in the port's table.
    pub index: u32,
    /// The identifier: for RoCE an IP address.
    pub gid: [u8; 16],
    /// Of what kind the packets are.
    pub kind: GidKind,
}

/// What packets are sent from a global identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// Of InfiniBand.
    InfiniBand,
    /// Of Ethernet, not routed.
    RoceV1,
    /// Of UDP.
    RoceV2,
}

impl GidInfo {
    /// The lowest is the best: IPv4, then an IPv6 address that is routed, then one of the link.
    fn rank(&self) -> u8 {
        match self.gid {
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, ..] => 0,
            [0xfe, second, ..] if second & 0xc0 == 0x80 => 2,
            _ => 1,
        }
    }
}

impl PortInfo {
    /// The identifier to be used, unless one is set: of InfiniBand the first one, of RoCE the best one of RoCE v2.
    pub fn preferred_gid(&self) -> Option<GidInfo> {
        if !self.ethernet {
            return self.gids.iter().min_by_key(|gid| gid.index).copied();
        }
        let routed = self.gids.iter().filter(|gid| gid.kind == GidKind::RoceV2);
        routed.min_by_key(|gid| (gid.rank(), gid.index)).copied()
    }
}

/// The adapters of this host.
///
/// # Errors
/// libibverbs cannot be loaded, or does not list any.
pub fn devices() -> Result<Vec<DeviceInfo>, AdapterError> {
    let library = Library::get()?;
    let list = DeviceList::new(library)?;
    let described = list.all().map(|device| list.describe(device));
    let others = list.not_found().into_iter().map(|name| DeviceInfo {
        name,
        unfit: Some(NOT_FOUND),
        ports: Vec::new(),
    });
    Ok(described.chain(others).collect())
}

/// The library's list. The devices in it live as long as the list, or as they are open.
pub(super) struct DeviceList {
    library: &'static Library,
    first: *mut *mut ibv_device,
    count: usize,
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from the library, and is freed once.
        unsafe { (self.library.ibv_free_device_list)(self.first) };
    }
}

impl DeviceList {
    pub(super) fn new(library: &'static Library) -> Result<Self, AdapterError> {
        let mut count = 0;
        // SAFETY: the pointer is that of a live integer.
        let first = unsafe { (library.ibv_get_device_list)(&mut count) };
        if first.is_null() {
            let why = failed("ibv_get_device_list");
            return Err(AdapterError::NoAdapter(format!(
                "this host has no adapter ({why})"
            )));
        }
        Ok(DeviceList {
            library,
            first,
            count: count.try_into().unwrap_or(0),
        })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = *mut ibv_device> {
        // SAFETY: the list has `count` entries, and lives as long as `self`.
        (0..self.count).map(|n| unsafe { *self.first.add(n) })
    }

    /// Names of adapters that the kernel has and the library does not list.
    pub(super) fn not_found(&self) -> Vec<String> {
        let listed: Vec<_> = self.all().map(|device| self.name(device)).collect();
        let kernel = std::fs::read_dir(KERNEL_LIST).into_iter().flatten();
        let names = kernel.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<_> = names.filter(|name| !listed.contains(name)).collect();
        names.sort();
        names
    }

    pub(super) fn name(&self, device: *mut ibv_device) -> String {
        // SAFETY: the device is one of the list, and its name is a string that ends.
        let name = unsafe { CStr::from_ptr((self.library.ibv_get_device_name)(device)) };
        name.to_string_lossy().into_owned()
    }

    /// Why a queue pair of this crate cannot be made on it.
    pub(super) fn unfit(&self, device: *mut ibv_device) -> Option<&'static str> {
        // SAFETY: the device is one of the list.
        match unsafe { (*device).transport_type } {
            IBV_TRANSPORT_IB => None,
            IBV_TRANSPORT_IWARP => Some("iWARP has no RDMA WRITE with immediate data"),
            _ => Some("it is neither InfiniBand nor RoCE"),
        }
    }

    fn describe(&self, device: *mut ibv_device) -> DeviceInfo {
        let (name, unfit) = (self.name(device), self.unfit(device));
        let ports = match unfit {
            None => OpenDevice::open(self.library, device).and_then(|open| open.ports()),
            Some(_) => Ok(Vec::new()),
        };
        DeviceInfo {
            name,
            unfit,
            ports: ports.unwrap_or_default(),
        }
    }
}

/// An open device.
pub(super) struct OpenDevice {
    pub(super) library: &'static Library,
    pub(super) context: *mut ibv_context,
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        // SAFETY: it is open, and whatever was made of it is destroyed before.
        unsafe { (self.library.ibv_close_device)(self.context) };
    }
}

impl OpenDevice {
    pub(super) fn open(
        library: &'static Library,
        device: *mut ibv_device,
    ) -> Result<Self, VerbsError> {
        // SAFETY: the device is one of a list that lives.
        let context = unsafe { (library.ibv_open_device)(device) };
        match context.is_null() {
            true => Err(failed("ibv_open_device")),
            false => Ok(OpenDevice { library, context }),
        }
    }

    pub(super) fn ports(&self) -> Result<Vec<PortInfo>, VerbsError> {
        // SAFETY: zeros are a value of this structure of numbers.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the device is open, and the structure has the layout of the header.
        let status = unsafe { (self.library.ibv_query_device)(self.context, &mut attr) };
        result("ibv_query_device", status)?;
        (1..=attr.phys_port_cnt).map(|n| self.port(n)).collect()
    }

    /// What the port is now.
    pub(super) fn port(&self, number: u8) -> Result<PortInfo, VerbsError> {
        // SAFETY: zeros are a value of this structure of numbers.
        let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the device is open. The function fills at most the structure of the header.
        let status = unsafe { (self.library.ibv_query_port)(self.context, number, &mut attr) };
        result("ibv_query_port", status)?;
        let entries = usize::from(attr.pkey_tbl_len).min(MOST_ENTRIES) as u16;
        let partitions = (0..entries).filter_map(|index| {
            let key = self.partition(number, index)?;
            (key & 0x7fff != 0).then_some((index, key))
        });
        Ok(PortInfo {
            number,
            active: attr.state == IBV_PORT_ACTIVE,
            ethernet: attr.link_layer == IBV_LINK_LAYER_ETHERNET,
            lid: attr.lid,
            mtu: u8::try_from(attr.active_mtu)
                .ok()
                .and_then(PathMtu::of)
                .unwrap_or(PathMtu::Mtu256),
            gids: self.gids(number)?,
            partitions: partitions.collect(),
        })
    }

    /// A key of the port's table. `None`: it cannot be read; the library reads a file for it.
    pub(super) fn partition(&self, port: u8, index: u16) -> Option<u16> {
        let mut key = 0;
        let query = self.library.ibv_query_pkey;
        // SAFETY: the device is open, and the pointer is that of a live integer.
        let status = unsafe { query(self.context, port, index.into(), &mut key) };
        (status == 0).then(|| u16::from_be(key))
    }

    fn gids(&self, port: u8) -> Result<Vec<GidInfo>, VerbsError> {
        let none = ibv_gid_entry {
            gid: [0; 2],
            gid_index: 0,
            port_num: 0,
            gid_type: 0,
            ndev_ifindex: 0,
        };
        let mut entries = vec![none; MOST_ENTRIES];
        // SAFETY: the device is open, and there is room for so many entries of this size.
        let found = unsafe {
            (self.library._ibv_query_gid_table)(
                self.context,
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size_of::<ibv_gid_entry>(),
            )
        };
        let Ok(found) = usize::try_from(found) else {
            let errno = i32::try_from(-found).unwrap_or(libc::EIO);
            return Err(VerbsError::new("ibv_query_gid_table", errno));
        };
        let of_port = entries[..found]
            .iter()
            .filter(|e| e.port_num == port.into());
        let all = of_port.filter_map(|entry| {
            let kind = match entry.gid_type {
                IBV_GID_TYPE_IB => GidKind::InfiniBand,
                IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
                IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
                _ => return None,
            };
            Some(GidInfo {
                index: entry.gid_index,
                gid: gid_bytes(entry.gid),
                kind,
            })
        });
        Ok(all.collect())
    }
}

/// The bytes of an identifier, as they lie in memory.
fn gid_bytes(words: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&words[0].to_ne_bytes());
    bytes[8..].copy_from_slice(&words[1].to_ne_bytes());
    bytes
}

/// An identifier as it lies in memory.
pub(super) fn gid_words(bytes: [u8; 16]) -> [u64; 2] {
    // Both slices have 8 bytes.
    let word = |from: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[from..from + 8]);
        u64::from_ne_bytes(word)
    };
    [word(0), word(8)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(ethernet: bool, gids: &[([u8; 16], GidKind)]) -> PortInfo {
        let gids = gids.iter().zip(0..).map(|((gid, kind), index)| GidInfo {
            index,
            gid: *gid,
            kind: *kind,
        });
        PortInfo {
            number: 1,
            active: true,
            ethernet,
            lid: 0,
            mtu: PathMtu::Mtu1024,
            gids: gids.collect(),
            partitions: vec![(0, 0xffff)],
        }
    }

    #[test]
    fn an_ipv4_address_of_roce_v2_is_preferred() {
        let ip = |text: &str| {
            let ip: std::net::Ipv6Addr = text.parse().unwrap();
            ip.octets()
        };
        let (link, global, v4) = (ip("fe80::1"), ip("2001:db8::1"), ip("::ffff:10.1.0.1"));
        use GidKind::{InfiniBand, RoceV1, RoceV2};
        let all = [
            (link, RoceV1),
            (link, RoceV2),
            (global, RoceV2),
            (v4, RoceV1),
            (v4, RoceV2),
        ];
        for (gids, best) in [
            (&all[..], Some(4)),
            (&all[..4], Some(2)),
            (&all[..2], Some(1)),
            (&all[..1], None),
        ] {
            let chosen = port(true, gids).preferred_gid();
            assert_eq!(chosen.map(|gid| gid.index), best);
        }
        let infiniband = port(false, &[(link, InfiniBand), (global, InfiniBand)]);
        assert_eq!(infiniband.preferred_gid().map(|gid| gid.index), Some(0));
        assert_eq!(gid_bytes(gid_words(v4)), v4);
    }
}
