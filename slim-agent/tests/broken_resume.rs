//! Resumes that are themselves broken. A program of its own: it destroys every connection to a resume
//! listener of the process.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{
    Kill, LIMIT, Pattern, Server, can_destroy, destroy_all_to, read_pattern, resume_listeners,
    write_pattern,
};
use slim_agent::Agent;
use slim_core::config::Config;

#[test]
fn a_resume_that_breaks_is_tried_again() {
    const PIECE: usize = 16 << 20;
    const RESUMES: u32 = 5;
    if !can_destroy() {
        println!(
            "skip: a_resume_that_breaks_is_tried_again: ss -K needs root, and a kernel that can destroy connections"
        );
        return;
    }
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    let ports = resume_listeners();
    thread::scope(|scope| {
        let destroyer = scope.spawn(|| {
            let mut random = Pattern::new(17);
            let begun = Instant::now();
            near.kill(Kill::Fin);
            // A loaded machine breaks, and resumes, less often.
            while begun.elapsed() < Duration::from_secs(3) || near.state().resumed < RESUMES {
                assert!(begun.elapsed() < 2 * LIMIT, "the flow is not resumed");
                // Whatever stage the resume is in: handshake, replay, or live.
                destroy_all_to(&ports);
                thread::sleep(Duration::from_millis(random.next() % 8));
            }
        });
        let mut round = 0;
        while !destroyer.is_finished() {
            round += 1;
            thread::scope(|scope| {
                let jobs = [
                    scope.spawn(|| write_pattern(&near, round, PIECE, 1 << 20)),
                    scope.spawn(|| read_pattern(&far, round, PIECE, 1 << 20)),
                    scope.spawn(|| write_pattern(&far, !round, PIECE, 1 << 20)),
                    scope.spawn(|| read_pattern(&near, !round, PIECE, 1 << 20)),
                ];
                for job in jobs {
                    job.join().expect("no wrong bytes").expect("no error");
                }
            });
        }
        destroyer.join().unwrap();
        println!("{round} times {PIECE} bytes there and back");
    });
    let resumed = near.state().resumed;
    println!("{resumed} resumes");
    assert!(resumed >= RESUMES);
}
