//! Calls that a signal handler may make do not use the program's heap. Where the system gives no more memory, the program
//! goes on as without SLIM.

mod common;

use common::{NEGOTIATED_MS, Program, compare, compile, own_network};

/// Asserts that the transcript with the preload is the bare one, on unbroken connections and on broken ones.
fn as_bare(case: &str) {
    if !own_network(case) {
        return;
    }
    let program = compile("heap", &["-fno-builtin"]);
    let run = |preloaded, breaks: &str| {
        let one = Program::new(&program)
            .arg(case)
            .env("T_OWN_NETWORK", "1")
            .env("T_BREAKS", breaks)
            .preloaded(preloaded)
            .negotiation_ms(NEGOTIATED_MS);
        let mut outcome = one.run();
        println!(
            "{case}, preloaded {preloaded}, breaks {breaks}: {}",
            outcome.stderr
        );
        outcome.stderr.clear();
        outcome
    };
    let bare = run(false, "0");
    assert!(bare.ok(), "{case} fails bare:\n{}", bare.transcript());
    for breaks in ["0", "1"] {
        let name = format!("{case}, broken {breaks}");
        if let Some(difference) = compare(&name, &bare, &run(true, breaks)) {
            panic!("\n{difference}");
        }
    }
}

#[test]
fn calls_leave_the_heap_alone() {
    as_bare("counted");
}

#[test]
fn a_handler_sends_inside_malloc() {
    as_bare("handler");
}

#[test]
fn the_first_connection_is_made_in_a_handler() {
    as_bare("first");
}

#[test]
fn memory_is_given_back() {
    as_bare("given-back");
}

#[test]
fn no_address_space_is_left() {
    as_bare("space");
}

#[test]
fn little_address_space_is_left() {
    as_bare("space-left");
}

#[test]
fn no_data_memory_is_left() {
    as_bare("data");
}
