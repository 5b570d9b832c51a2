//! Two ranks of Open MPI with two lines between them, each with adapters of soft RoCE at its ends: the flow of each rail is on queue pairs of its own line.

use std::{
    fs,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use slim_lab::{
    Error,
    mpi::{Flavor, Mpi, component_arguments},
    skip::skip,
};

use super::{
    openmpi::{SOON, component},
    rxe, shell, succeeds, wait,
};

/// The ranks work for as long as there is this file.
const GOES_ON: &str = "/run/tmp/rails-go-on";

/// A second line, made as the first one.
const SECOND_LINE: &str = r#"
ip link add w1 address 02:00:00:00:01:01 type veth peer name w2 address 02:00:00:00:01:02
for i in w1 w2; do
  echo 1 > /proc/sys/net/ipv4/conf/$i/accept_local
  echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter
done
ip addr add 10.2.0.1/24 dev w1
ip addr add 10.2.0.2/24 dev w2
ip link set w1 mtu 9000 up
ip link set w2 mtu 9000 up
ip rule add pref 11 iif lo to 10.2.0.1 lookup 13
ip rule add pref 11 iif lo to 10.2.0.2 lookup 14
ip neigh replace 10.2.0.2 lladdr 02:00:00:00:01:02 dev w1 nud permanent
ip neigh replace 10.2.0.1 lladdr 02:00:00:00:01:01 dev w2 nud permanent
ip route replace 10.2.0.1 dev w2 src 10.2.0.2 table 13
ip route replace 10.2.0.2 dev w1 src 10.2.0.1 table 14
rdma link add ry1 type rxe netdev w1
rdma link add ry2 type rxe netdev w2
"#;

/// Each rank has its ends of both lines, and the adapters there.
const OWN_ENDS: &str = r#"
n=$((OMPI_COMM_WORLD_RANK + 1))
export OMPI_MCA_btl_slim_if_include=v$n,w$n OMPI_MCA_btl_slim_verbs_ports=rx$n,ry$n
exec "$0" "$@""#;

/// Connected queue pairs of each adapter: of the first line, and of the second.
fn by_line() -> [usize; 4] {
    let output = Command::new("rdma").args(["res", "show", "qp"]).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let connected = |line: &&str| line.contains("type RC") && line.contains("state RTS");
    let pairs: Vec<_> = text.lines().filter(connected).collect();
    ["rx1", "rx2", "ry1", "ry2"].map(|device| {
        let at = format!("link {device}/1 ");
        pairs.iter().filter(|line| line.contains(&at)).count()
    })
}

#[test]
fn each_rail_is_on_queue_pairs_of_its_line() {
    let test = "rails::each_rail_is_on_queue_pairs_of_its_line";
    let built = Mpi::find(Flavor::OpenMpi4).and_then(|mpi| {
        let built = (component(&mpi)?, mpi.build_program("slim_kinds.c")?);
        Ok((built, mpi))
    });
    let ((component, program), mpi) = match built {
        Ok(built) => built,
        Err(error @ Error::Missing { .. }) => return skip(test, error),
        Err(error) => panic!("{error}"),
    };
    let Some(rxe) = rxe(test) else {
        return;
    };
    shell("hostname guest");
    shell(SECOND_LINE);
    thread::sleep(Duration::from_millis(500));
    fs::write(GOES_ON, "").unwrap();
    let running = Command::new(mpi.mpirun())
        .args(["--allow-run-as-root", "--oversubscribe", "-np", "2"])
        .args(["--bind-to", "none", "--mca", "pml", "ob1"])
        .args(["--mca", "btl", "slim,self"])
        .args(["--mca", "btl_slim_transports", "verbs,tcp"])
        .args(component_arguments(&mpi, &component))
        .args(["sh", "-c", OWN_ENDS])
        .arg(program)
        .args(["sizes", "1", GOES_ON])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait("one on each line", SOON, || {
        (by_line() == [1; 4]).then_some(())
    });
    rxe.down(0);
    wait("none on the first line", SOON, || {
        (by_line()[..2] == [0; 2]).then_some(())
    });
    println!("a line without link: {:?}", by_line());
    rxe.up(0);
    fs::remove_file(GOES_ON).unwrap();
    let [out, _] = succeeds(running);
    assert!(out.contains("DONE"));
}
