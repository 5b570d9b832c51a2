//! Tests of `slim_pp` itself: it accepts right data, and detects one wrong bit.

mod common;

use common::{Scratch, output};
use slim_lab::mpi::{Flavor, Mpi, by_tcp};
use slim_lab::{Lab, skip::skip};

/// Changes one bit in the middle of every read into a long buffer: that has data of a message and no headers. On a busy machine most
/// reads are short.
const CORRUPTING: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
ssize_t readv(int fd, const struct iovec *v, int n)
{
    static ssize_t (*real)(int, const struct iovec *, int);
    if (!real)
        real = (ssize_t (*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "readv");
    ssize_t got = real(fd, v, n);
    /* Longer than the buffer in which Open MPI reads ahead. */
    if (n > 0 && v[0].iov_len > 40000 && got > 0)
        ((char *)v[0].iov_base)[got / 2 < 20000 ? got / 2 : 20000] ^= 1;
    return got;
}
"#;

/// Runs two ranks on one node for a second; returns status and output.
fn run(test: &str, corrupting: bool) -> Option<(i32, String)> {
    let mpi = match Lab::check().and_then(|()| Mpi::find(Flavor::OpenMpi4)) {
        Ok(mpi) => mpi,
        Err(reason) => {
            skip(test, reason);
            return None;
        }
    };
    let scratch = Scratch::new(test);
    let program = mpi.build_program("slim_pp.c").unwrap();
    let lab = Lab::builder().nodes(1).name("cli-pp").build().unwrap();
    let mut command = lab.node(0).command(mpi.mpirun());
    command.args(["--allow-run-as-root", "--oversubscribe", "-np", "2"]);
    command.args(by_tcp("lo"));
    if corrupting {
        let source = scratch.write("corrupting.c", CORRUPTING);
        let library = scratch.path("corrupting.so");
        let mut gcc = std::process::Command::new("gcc");
        gcc.args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .arg("-ldl");
        assert!(gcc.status().unwrap().success());
        command
            .arg("-x")
            .arg(format!("LD_PRELOAD={}", library.display()));
    }
    let (status, out, err) = output(command.arg(program).arg("1"));
    Some((status, out + &err))
}

#[test]
fn right_data_ends_with_status_0() {
    let Some((status, out)) = run("right_data_ends_with_status_0", false) else {
        return;
    };
    assert_eq!(status, 0, "{out}");
    assert!(
        out.lines()
            .any(|l| l.starts_with("DONE ") && l.contains(" errs=0 ")),
        "{out}"
    );
}

#[test]
fn a_changed_bit_ends_with_status_3() {
    let Some((status, out)) = run("a_changed_bit_ends_with_status_3", true) else {
        return;
    };
    assert_eq!(status, 3, "{out}");
    assert!(out.contains("wrong data in "), "{out}");
}
