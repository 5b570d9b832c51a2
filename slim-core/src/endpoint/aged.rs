//! Tables whose entries are bounded in number and in age.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use crate::ids::Time;

/// A table of at most `MOST` entries. An entry older than the table's age is never returned. When the table is full, a new
/// entry displaces the oldest.
pub(super) struct Aged<K, V, const MOST: usize> {
    known: HashMap<K, AgedEntry<V>>,
    /// By number, oldest first. Entries whose number differs from that in `known` are stale.
    order: VecDeque<(u64, Time, K)>,
    next: u64,
    age: Duration,
}

struct AgedEntry<V> {
    number: u64,
    since: Time,
    value: V,
}

impl<K: Clone + Eq + Hash, V, const MOST: usize> Aged<K, V, MOST> {
    pub(super) fn new(age: Duration) -> Self {
        Aged {
            known: HashMap::new(),
            order: VecDeque::new(),
            next: 0,
            age,
        }
    }

    /// Inserts an entry, or replaces the one with this key.
    pub(super) fn put(&mut self, now: Time, key: K, value: V) {
        self.expire(now);
        self.next += 1;
        let entry = AgedEntry {
            number: self.next,
            since: now,
            value,
        };
        self.order.push_back((self.next, now, key.clone()));
        self.known.insert(key, entry);
        while self.known.len() > MOST && self.pop() {}
        // Stale entries must not pile up behind an old one that lasts.
        if self.order.len() > 2 * MOST {
            let known = &self.known;
            self.order
                .retain(|(number, _, key)| known.get(key).is_some_and(|e| e.number == *number));
        }
    }

    /// Makes the entry with this key as young as a new one, if it is older than a quarter of the table's age.
    pub(super) fn renew(&mut self, now: Time, key: &K) {
        let worn = |e: &AgedEntry<V>| (self.age / 4..self.age).contains(&now.since(e.since));
        if self.known.get(key).is_some_and(worn)
            && let Some(entry) = self.known.remove(key)
        {
            self.put(now, key.clone(), entry.value);
        }
    }

    pub(super) fn get(&self, now: Time, key: &K) -> Option<&V> {
        let entry = self.known.get(key)?;
        (now.since(entry.since) < self.age).then_some(&entry.value)
    }

    pub(super) fn get_mut(&mut self, now: Time, key: &K) -> Option<&mut V> {
        let entry = self.known.get_mut(key)?;
        (now.since(entry.since) < self.age).then_some(&mut entry.value)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.known.keys()
    }

    /// Forgets entries for which `keep` does not hold.
    pub(super) fn retain(&mut self, keep: impl Fn(&V) -> bool) {
        self.known.retain(|_, entry| keep(&entry.value));
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let removed = self.known.remove(key);
        if self.known.is_empty() {
            *self = Self::new(self.age);
        }
        removed.map(|entry| entry.value)
    }

    /// Forgets entries that are too old, and gives the memory back if none are left.
    pub(super) fn expire(&mut self, now: Time) {
        while let Some((_, since, _)) = self.order.front()
            && now.since(*since) >= self.age
        {
            self.pop();
        }
        if self.order.is_empty() && self.order.capacity() > 0 {
            *self = Self::new(self.age);
        }
    }

    /// Forgets the oldest entry of `order`; false if there is none.
    fn pop(&mut self) -> bool {
        let Some((number, _, key)) = self.order.pop_front() else {
            return false;
        };
        if self.known.get(&key).is_some_and(|e| e.number == number) {
            self.known.remove(&key);
        }
        true
    }

    pub(super) fn len(&self) -> usize {
        debug_assert!(self.known.len() <= self.order.len());
        self.known.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Table = Aged<u64, &'static str, 4>;

    fn at(secs: u64) -> Time {
        Time(secs * 1_000_000)
    }

    fn table() -> Table {
        Aged::new(Duration::from_secs(10))
    }

    #[test]
    fn an_old_entry_is_not_returned_and_then_removed() {
        let mut table = table();
        table.put(at(0), 1, "a");
        table.put(at(5), 2, "b");
        assert_eq!(table.get(at(9), &1), Some(&"a"));
        assert_eq!(table.get(at(10), &1), None);
        table.expire(at(10));
        assert_eq!((table.len(), table.get(at(10), &2)), (1, Some(&"b")));
        table.expire(at(15));
        assert_eq!((table.len(), table.known.capacity()), (0, 0));
    }

    #[test]
    fn a_renewed_entry_lasts_longer() {
        let mut table = table();
        table.put(at(0), 1, "a");
        table.put(at(0), 2, "b");
        table.renew(at(8), &1);
        table.renew(at(8), &3);
        table.expire(at(11));
        assert_eq!(
            (table.get(at(17), &1), table.get(at(11), &2)),
            (Some(&"a"), None)
        );
        table.renew(at(18), &1);
        assert_eq!(
            (table.len(), table.get(at(18), &1)),
            (1, None),
            "renewed too late"
        );
    }

    #[test]
    fn memory_is_given_back_with_the_last_entry() {
        let mut table = table();
        table.put(at(0), 1, "a");
        table.put(at(0), 2, "b");
        table.remove(&1);
        assert_eq!((table.len(), table.get(at(1), &2)), (1, Some(&"b")));
        table.remove(&2);
        assert_eq!((table.known.capacity(), table.order.capacity()), (0, 0));
        table.put(at(1), 3, "c");
        assert_eq!(table.get(at(1), &3), Some(&"c"));
    }

    #[test]
    fn a_new_entry_displaces_the_oldest() {
        let mut table = table();
        for n in 0..6 {
            table.put(at(n), n, "x");
        }
        assert_eq!(table.len(), 4);
        assert_eq!(
            (table.get(at(6), &1), table.get(at(6), &2)),
            (None, Some(&"x"))
        );
    }

    #[test]
    fn a_replaced_entry_is_young_and_leaves_no_stale_entries_behind() {
        let mut table = table();
        table.put(at(0), 9, "lasts");
        for n in 0..100 {
            table.put(at(1 + n / 50), 1, "x");
            table.put(at(1 + n / 50), 2, "y");
            table.remove(&2);
        }
        assert!(table.order.len() <= 8);
        assert_eq!(table.len(), 2);
        table.expire(at(11));
        assert_eq!(table.get(at(11), &1), Some(&"x"));
    }
}
