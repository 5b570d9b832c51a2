//! Faults that several of a plan have in common: two that take the same link down are one fault, which ends with the last of them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// A node and an interface of it.
type FaultPlace = (String, String);

/// The faults in force, each with the number of those that share it.
#[derive(Debug)]
pub struct SharedFaults<G>(Rc<RefCell<HashMap<FaultPlace, (usize, G)>>>);

/// One share of a fault. The fault ends when its last share is dropped.
#[derive(Debug)]
pub struct FaultShare<G> {
    faults: SharedFaults<G>,
    place: FaultPlace,
    released: bool,
}

impl<G> Default for SharedFaults<G> {
    fn default() -> Self {
        Self(Rc::default())
    }
}

impl<G> SharedFaults<G> {
    /// A share of the fault at this place, which `make` makes if it is not in force.
    pub fn share<E>(
        &self,
        node: &str,
        interface: &str,
        make: impl FnOnce() -> Result<G, E>,
    ) -> Result<FaultShare<G>, E> {
        let place = (node.to_owned(), interface.to_owned());
        let mut all = self.0.borrow_mut();
        match all.get_mut(&place) {
            Some((shares, _)) => *shares += 1,
            None => drop(all.insert(place.clone(), (1, make()?))),
        }
        Ok(FaultShare {
            faults: Self(self.0.clone()),
            place,
            released: false,
        })
    }
}

impl<G> FaultShare<G> {
    /// Gives the share back. Returns the fault if it was the last one.
    pub fn last(mut self) -> Option<G> {
        self.release()
    }

    fn release(&mut self) -> Option<G> {
        if std::mem::replace(&mut self.released, true) {
            return None;
        }
        let mut all = self.faults.0.borrow_mut();
        let (shares, _) = all.get_mut(&self.place)?;
        *shares -= 1;
        match shares {
            0 => all.remove(&self.place).map(|(_, guard)| guard),
            _ => None,
        }
    }
}

impl<G> Drop for FaultShare<G> {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_ends_with_its_last_share() {
        let faults = SharedFaults::default();
        let made = || Ok::<_, ()>(7);
        let first = faults.share("a", "path0", made).unwrap();
        let second = faults.share("a", "path0", || Err(())).unwrap();
        let other = faults.share("b", "path0", made).unwrap();
        assert_eq!(first.last(), None);
        assert_eq!(second.last(), Some(7));
        assert!(faults.share("a", "path0", || Err(())).is_err());
        drop(other);
        assert!(faults.0.borrow().is_empty());
    }
}
