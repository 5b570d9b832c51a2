//! Other kinds of transport: `docs/PROTOCOL.md`, section "Kinds of transport".

use super::ParseError;
use super::field::*;
use super::layout::{LOCATOR, MAX_LOCATORS, offer};
use crate::ids::FlowId;
use crate::transport::{MAX_LOCATOR, OtherLocator, TransportKind};

/// Announces how the sender is reached by kinds of transport other than TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// A flow between the two endpoints.
    pub flow: FlowId,
    /// Grows when the sender's locators change; never 0.
    pub serial: u64,
    /// Serial of the OFFER that this one answers; 0 in one that is to be answered.
    pub answers: u64,
    /// How the sender is reached.
    pub locators: LocatorList,
}

/// Up to [`MAX_LOCATORS`] locators of other kinds than TCP, best first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocatorList([Option<OtherLocator>; MAX_LOCATORS]);

impl LocatorList {
    /// The first [`MAX_LOCATORS`] of `locators`; the rest are left out.
    pub fn new(locators: impl IntoIterator<Item = OtherLocator>) -> Self {
        let mut list = LocatorList::default();
        for (place, locator) in list.0.iter_mut().zip(locators) {
            *place = Some(locator);
        }
        list
    }

    /// The locators.
    pub fn iter(&self) -> impl Iterator<Item = &OtherLocator> {
        self.0.iter().flatten()
    }
}

impl Offer {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        let serial = read_u64(b, offer::SERIAL);
        if serial == 0 {
            return Err(ParseError::Value("serial"));
        }
        Ok(Offer {
            flow: FlowId(array(b, offer::FLOW)),
            serial,
            answers: read_u64(b, offer::ANSWERS),
            locators: read_locators(b, offer::LOCATORS)?,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, offer::FLOW, &self.flow.0);
        put_u64(b, offer::SERIAL, self.serial);
        put_u64(b, offer::ANSWERS, self.answers);
        put_locators(b, offer::LOCATORS, &self.locators);
    }
}

fn read_locators(b: &[u8], at: usize) -> Result<LocatorList, ParseError> {
    let count = usize::from(b[at]);
    if count > MAX_LOCATORS {
        return Err(ParseError::Value("number of locators"));
    }
    let (used, unused) = b[at + 1..at + 1 + MAX_LOCATORS * LOCATOR].split_at(count * LOCATOR);
    if unused.iter().any(|&x| x != 0) {
        return Err(ParseError::Value("unused locator"));
    }
    let mut list = LocatorList::default();
    for (place, bytes) in list.0.iter_mut().zip(used.chunks(LOCATOR)) {
        *place = Some(read_locator(bytes)?);
    }
    Ok(list)
}

fn read_locator(b: &[u8]) -> Result<OtherLocator, ParseError> {
    let (kind, len) = (TransportKind::new(b[0]), usize::from(b[1]));
    let refused = ParseError::Value("locator");
    let (bytes, rest) = b[2..].split_at(len.min(MAX_LOCATOR));
    if bytes.len() != len || rest.iter().any(|&x| x != 0) {
        return Err(refused);
    }
    OtherLocator::new(kind, bytes).ok_or(refused)
}

fn put_locators(b: &mut [u8], at: usize, locators: &LocatorList) {
    for (i, locator) in locators.iter().enumerate() {
        // At most MAX_LOCATORS, which is 4.
        b[at] = i as u8 + 1;
        let place = at + 1 + i * LOCATOR;
        let bytes = locator.bytes();
        b[place] = locator.kind().number();
        // At most MAX_LOCATOR, which is 64.
        b[place + 1] = bytes.len() as u8;
        put(b, place + 2, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full_list() -> Vec<u8> {
        let of = |n: usize| OtherLocator::new(TransportKind::TEST, &vec![7; n]).unwrap();
        let list = LocatorList::new([of(MAX_LOCATOR), of(1), of(2), of(3), of(4)]);
        assert_eq!(list.iter().count(), MAX_LOCATORS, "a fifth is left out");
        let mut b = vec![0; 1 + MAX_LOCATORS * LOCATOR];
        put_locators(&mut b, 0, &list);
        assert_eq!(read_locators(&b, 0), Ok(list));
        b
    }

    #[test]
    fn a_list_of_locators_has_one_encoding() {
        let good = full_list();
        for (what, at, value) in [
            ("a count beyond the room", 0, 5),
            ("a count that is too small", 0, 3),
            ("a count of zero before locators", 0, 0),
            ("a locator of TCP", 1, 0),
            ("a locator of no bytes", 2, 0),
            ("a length beyond the room", 2, 65),
            ("a length that is too small", 2, 63),
        ] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(read_locators(&bad, 0).is_err(), "{what}");
        }
    }

    #[test]
    fn an_empty_list_is_all_zeros() {
        let b = [0; 1 + MAX_LOCATORS * LOCATOR];
        assert_eq!(read_locators(&b, 0), Ok(LocatorList::default()));
        let mut written = b;
        put_locators(&mut written, 0, &LocatorList::default());
        assert_eq!(written, b);
    }
}
