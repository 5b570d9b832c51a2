//! Mistakes that the simulation puts in, to show that it detects them. Other builds make none.

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mistake {
    /// A queue pair is made for anybody who asks.
    NoCookies,
    /// A cookie counts for any request.
    AnybodysCookies,
    /// A cookie counts for ever.
    OldCookies,
    /// A repeated request gets a second queue pair.
    ForgetLive,
    /// A request that comes after the end of its attempt gets a queue pair.
    ForgetEnded,
    /// Unproved queue pairs live for ever.
    NoExpiry,
    /// An answer counts for any attempt that asks its sender.
    AnyAttempt,
    /// An attempt that has ended keeps its queue pair.
    KeepHalf,
}

/// The mistake that is made, if any.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mistakes {
    #[cfg(test)]
    pub(super) made: Option<Mistake>,
}

impl Mistakes {
    #[cfg(test)]
    pub(super) fn has(&self, mistake: Mistake) -> bool {
        self.made == Some(mistake)
    }

    #[cfg(not(test))]
    pub(super) fn has(&self, _: Mistake) -> bool {
        false
    }
}
