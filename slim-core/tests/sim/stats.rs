//! What happened in a run, or in many.

/// What a run contained, to check that the simulator covers enough.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub events: u64,
    pub resumes: u64,
    pub escalations: u64,
    pub reinstated: u64,
    pub legacy: u64,
    pub ended: u64,
    pub believed: u64,
    pub confirms_flushed: u64,
    pub crashes: u64,
    pub restarts: u64,
    pub vanished: u64,
    pub forged: u64,
    /// Datagrams that a host would have refused if it did not limit its ICMP messages.
    pub unrefused: u64,
    /// Flows that began with OPEN.
    pub dialled: u64,
    /// Flows that were agreed on by other means than HELLO.
    pub agreed: u64,
    /// How often all networks of a kind of transport failed.
    pub blackouts: u64,
    /// How often one side of a flow moved to the other kind of transport.
    pub to_memory: u64,
    pub to_tcp: u64,
    /// How often a flow began to move to a kind that it prefers.
    pub moves: u64,
    /// How often a flow began to rest, and how many timers have expired while all flows without a transport rested.
    pub held: u64,
    pub wakes: u64,
    /// For how long flows have rested, in seconds.
    pub rested: u64,
}

impl Stats {
    pub fn add(&mut self, other: &Stats) {
        self.events += other.events;
        self.resumes += other.resumes;
        self.escalations += other.escalations;
        self.reinstated += other.reinstated;
        self.legacy += other.legacy;
        self.ended += other.ended;
        self.believed += other.believed;
        self.confirms_flushed += other.confirms_flushed;
        self.crashes += other.crashes;
        self.restarts += other.restarts;
        self.vanished += other.vanished;
        self.forged += other.forged;
        self.unrefused += other.unrefused;
        self.dialled += other.dialled;
        self.agreed += other.agreed;
        self.blackouts += other.blackouts;
        self.to_memory += other.to_memory;
        self.to_tcp += other.to_tcp;
        self.moves += other.moves;
        self.held += other.held;
        self.wakes += other.wakes;
        self.rested += other.rested;
    }
}
