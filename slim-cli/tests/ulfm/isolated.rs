//! The host of one of four ranks is cut off from the hosts of the others, but not from the witness. Its rank alone is lost, though it may be
//! the first one to accuse the others.

use slim_lab::mpi::Flavor;

use super::lab::{SHORT, Shape, UlfmLab, has_finished, part, runs, silence};

fn one_of_four(test: &str, breaks: bool) {
    for run in 0..runs() / 2 {
        let Some(bench) = UlfmLab::new(test, Flavor::OpenMpi5, 5) else {
            return;
        };
        let job = bench.start(Shape {
            nodes: 4,
            seconds: 5,
            words: SHORT,
            ..Shape::PAIR
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let (one, others) = match run % 2 {
            0 => (&nodes[1..2], &nodes[2..5]),
            _ => (&nodes[4..5], &nodes[1..4]),
        };
        let _parted = match breaks {
            true => part(one, others),
            false => silence(one, others),
        };
        let ended = job.wait();
        println!("run {run}: {:?}\n{}", ended.status, ended.text);
        assert!(has_finished(&ended, 3), "{}", ended.text);
    }
}

#[test]
fn a_rank_that_is_cut_off_is_the_only_one_lost() {
    one_of_four("a_rank_that_is_cut_off_is_the_only_one_lost", true);
}

/// No connection breaks, so each rank notices only the silence of those to which it is just sending.
#[test]
fn a_rank_that_falls_silent_is_the_only_one_lost() {
    one_of_four("a_rank_that_falls_silent_is_the_only_one_lost", false);
}
