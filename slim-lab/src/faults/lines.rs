//! Interfaces with [`Netem`] on them. Faults may overlap: what several say of one interface is put together, and each one ends alone.
//!
//! Nothing is left behind, however the program ends: a [`Watcher`] removes netem.

use std::{cell::RefCell, collections::HashMap, rc::Rc};

use serde_json::Value;

use super::{
    netem::{Netem, outcome},
    watcher::{Watcher, quoted},
};
use crate::{Error, Netns, Result};

/// The handles of our disciplines, in turn: netem would keep options that it is not told when it is changed, so each change is a new one.
const HANDLES: [&str; 2] = ["5111:", "5112:"];

/// The interfaces that have netem now.
#[derive(Clone, Debug, Default)]
pub struct NetemLines(Rc<RefCell<HashMap<LinePlace, NetemLine>>>);

/// A network namespace and an interface in it.
type LinePlace = ((u64, u64), String);

/// An interface with netem.
#[derive(Debug)]
struct NetemLine {
    net: Netns,
    interface: String,
    /// The faults in force, the oldest first, each with its number.
    faults: Vec<(usize, Netem)>,
    /// The number of the next fault.
    next: usize,
    /// The handle in force: an index of [`HANDLES`].
    handle: Option<usize>,
    watcher: Option<Watcher>,
}

/// One fault in force. It ends when this is lifted or dropped.
#[derive(Debug)]
pub struct LineGuard {
    lines: NetemLines,
    place: LinePlace,
    number: usize,
    lifted: bool,
}

/// Checks that the interface has no queueing discipline but the kernel's default, which the kernel itself puts back.
///
/// # Errors
/// It has one of its own.
pub fn check_free(net: &Netns, interface: &str) -> Result<()> {
    match root(net, interface)? {
        (_, handle) if handle == "0:" => Ok(()),
        (kind, handle) => Err(Error::Invalid(format!(
            "{interface} has a queueing discipline of its own ({kind} {handle}), which netem would replace: remove it first \
             (tc qdisc del dev {interface} root)"
        ))),
    }
}

/// Kind and handle of the discipline at the root of an interface. The kernel's default has the handle `0:`.
fn root(net: &Netns, interface: &str) -> Result<(String, String)> {
    let text = net.exec("tc", &["-j", "qdisc", "show", "dev", interface])?;
    let json: Value =
        serde_json::from_str(&text).map_err(|e| Error::Invalid(format!("tc -j qdisc: {e}")))?;
    let all = json.as_array().map(Vec::as_slice).unwrap_or_default();
    let root = all.iter().find(|one| one["root"] == true);
    let word = |key: &str| root.and_then(|one| one[key].as_str());
    Ok((
        word("kind").unwrap_or("noqueue").to_owned(),
        word("handle").unwrap_or("0:").to_owned(),
    ))
}

impl NetemLines {
    /// Puts `netem` on an interface, together with what is there already. The newest fault that says something of a property decides it.
    ///
    /// # Errors
    /// The kernel cannot do it, or the interface has a discipline that is not from here.
    pub fn apply(&self, net: &Netns, interface: &str, netem: &Netem) -> Result<LineGuard> {
        let place = (net.id(), interface.to_owned());
        let mut lines = self.0.borrow_mut();
        if !lines.contains_key(&place) {
            check_free(net, interface)?;
            lines.insert(place.clone(), NetemLine::new(net, interface)?);
        }
        let line = lines.get_mut(&place).expect("it is there or was made");
        let number = line.next;
        line.next += 1;
        line.faults.push((number, netem.clone()));
        drop(lines);
        let guard = LineGuard {
            lines: self.clone(),
            place,
            number,
            lifted: false,
        };
        // If it fails, the guard takes the fault back.
        self.renew(&guard.place)?;
        Ok(guard)
    }

    /// Makes the interface do what the faults in force say.
    fn renew(&self, place: &LinePlace) -> Result<()> {
        match self.0.borrow_mut().get_mut(place) {
            Some(line) => line.renew(),
            None => Ok(()),
        }
    }

    /// One fault is over.
    fn release(&self, place: &LinePlace, number: usize) -> Result<()> {
        let mut lines = self.0.borrow_mut();
        let Some(line) = lines.get_mut(place) else {
            return Ok(());
        };
        line.faults.retain(|(n, _)| *n != number);
        let result = line.renew();
        if line.faults.is_empty() {
            lines.remove(place);
        }
        result
    }
}

impl NetemLine {
    fn new(net: &Netns, interface: &str) -> Result<Self> {
        let name = quoted(interface);
        let remove =
            HANDLES.map(|handle| format!("inside tc qdisc del dev {name} root handle {handle}"));
        Ok(NetemLine {
            net: net.clone(),
            interface: interface.to_owned(),
            faults: Vec::new(),
            next: 0,
            handle: None,
            watcher: Some(Watcher::start(net, interface, &remove.join("\n"))?),
        })
    }

    fn renew(&mut self) -> Result<()> {
        let all = self.faults.iter().map(|(_, netem)| netem);
        let netem = all.fold(Netem::default(), |older, newer| older.with(newer));
        if netem.is_empty() {
            if let Some(old) = self.handle {
                self.tc("del", &["handle", HANDLES[old]])?;
                self.handle = None;
            }
            return Ok(());
        }
        self.check_ours()?;
        let new = self.handle.map_or(0, |old| 1 - old);
        let arguments = netem.arguments();
        let mut words = vec!["handle", HANDLES[new], "netem"];
        words.extend(arguments.iter().map(String::as_str));
        self.tc("replace", &words)?;
        self.handle = Some(new);
        Ok(())
    }

    /// Somebody else may have changed the interface since the first fault.
    fn check_ours(&self) -> Result<()> {
        match self.handle {
            Some(old) if root(&self.net, &self.interface)?.1 == HANDLES[old] => Ok(()),
            _ => check_free(&self.net, &self.interface),
        }
    }

    /// Runs `tc qdisc VERB dev … root …`.
    fn tc(&self, verb: &str, rest: &[&str]) -> Result<()> {
        let mut words = vec!["qdisc", verb, "dev", &self.interface, "root"];
        words.extend(rest);
        let line = format!("tc {}", words.join(" "));
        let mut command = self.net.command("tc");
        command.args(&words);
        if let Some(watcher) = &self.watcher {
            watcher.outlives(&mut command)?;
        }
        outcome(&line, command.output())
    }
}

impl Drop for NetemLine {
    fn drop(&mut self) {
        // Else the watcher removes what is left.
        if self.handle.is_none() {
            self.watcher.take().into_iter().for_each(Watcher::over);
        }
    }
}

impl LineGuard {
    /// Ends the fault; others on the interface stay in force.
    pub fn lift(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.lifted, true) {
            return Ok(());
        }
        self.lines.release(&self.place, self.number)
    }
}

impl Drop for LineGuard {
    fn drop(&mut self) {
        // The interface may be gone already.
        let _ = self.end();
    }
}
