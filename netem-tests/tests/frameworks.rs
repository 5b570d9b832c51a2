//! Frameworks that are no MPI: unmodified programs on two hosts, started by `slim run`. With connections being killed all the time they
//! give the result of an undisturbed run, bit by bit. Without SLIM they do not.

mod common;

use std::path::Path;

use common::framework::{Framework, Part, address, four, rides_through, script};
use slim_lab::{artifacts, mpi};

#[test]
fn pytorch_trains_with_torchrun() {
    let torch = Framework::debian("PyTorch", "torch");
    rides_through("pytorch_trains_with_torchrun", &torch, |lab, python| {
        let master = address(lab, 0);
        let node = |n: usize| {
            // With the redirection, this version of torchrun works with this version of Python.
            let run = format!(
                "-m torch.distributed.run --nnodes 2 --nproc_per_node 2 --node_rank {n} --master_addr {master} \
                 --master_port 29500 -r 1 -t 1"
            );
            let part = Part::new(n, python).words(&run);
            part.path(script("torch_train.py")).words("100")
        };
        vec![node(0), node(1)]
    });
}

#[test]
fn mpi4py_reduces() {
    let mpi4py = Framework::wheel("mpi4py", "mpi4py.MPI");
    rides_through("mpi4py_reduces", &mpi4py, |lab, python| {
        let [a, b] = [0, 1].map(|n| lab.node(n).name());
        let launcher = Part::new(0, Path::new("/usr/bin/mpirun.openmpi"))
            .words("--mca plm_rsh_agent")
            .path(artifacts::program("slim-lab-agent").expect("the lab's agent"))
            .words(&format!("--allow-run-as-root --host {a}:2,{b}:2 -n 4"))
            .words(&mpi::by_tcp(&lab.subnet(0)).join(" "));
        let program = launcher.path(python).path(script("mpi4py_sum.py"));
        vec![program.words("200")]
    });
}

#[test]
fn jax_trains() {
    let jax = Framework::wheel("JAX", "jax");
    rides_through("jax_trains", &jax, |lab, python| {
        let coordinator = address(lab, 0);
        four(python, "jax_train.py", |n| {
            format!("{n} 4 {coordinator}:29800 200")
        })
    });
}

#[test]
fn xgboost_trains() {
    let xgboost = Framework::wheel("XGBoost", "xgboost");
    rides_through("xgboost_trains", &xgboost, |lab, python| {
        let tracker = address(lab, 0);
        four(python, "xgboost_train.py", |n| {
            format!("{n} 4 {tracker} 29600 300")
        })
    });
}

#[test]
fn lightgbm_trains() {
    let lightgbm = Framework::wheel("LightGBM", "lightgbm");
    rides_through("lightgbm_trains", &lightgbm, |lab, python| {
        let (a, b) = (address(lab, 0), address(lab, 1));
        four(python, "lightgbm_train.py", |n| {
            format!("{n} {a}:29700,{a}:29701,{b}:29700,{b}:29701 300")
        })
    });
}

#[test]
fn dask_computes() {
    let dask = Framework::wheel("Dask", "distributed").repeats();
    rides_through("dask_computes", &dask, |lab, python| {
        let dask = python.with_file_name("dask");
        let (a, b) = (address(lab, 0), address(lab, 1));
        let worker = |node: usize, own: &str| {
            let port = 8790;
            let words = format!(
                "worker {a}:8786 --host {own} --worker-port {port} --nthreads 1 --no-dashboard --no-nanny"
            );
            Part::new(node, &dask).words(&words).server(port)
        };
        let scheduler = format!("scheduler --host {a} --port 8786 --no-dashboard");
        let client = Part::new(1, python).path(script("dask_sum.py"));
        vec![
            Part::new(0, &dask).words(&scheduler).server(8786),
            worker(0, &a),
            worker(1, &b),
            client.words(&format!("{a}:8786 2 60")),
        ]
    });
}

#[test]
fn ray_computes() {
    let ray = Framework::wheel("Ray", "ray").repeats();
    rides_through("ray_computes", &ray, |lab, python| {
        let ray = python.with_file_name("ray");
        let node = |n: usize| {
            let own = address(lab, n);
            Part::new(n, &ray).words(&format!(
                "start --num-cpus 1 --block --node-ip-address {own}"
            ))
        };
        let head = format!("{}:6379", address(lab, 0));
        let first = node(0)
            .words("--head --port 6379 --include-dashboard=false --temp-dir")
            // Ray makes Unix sockets there, so the path must be short.
            .path(lab.dir().join("r"));
        let second = node(1).words(&format!("--address {head} --node-manager-port 6390"));
        let driver = Part::new(0, python).path(script("ray_sum.py"));
        vec![
            first.server(6379),
            second.server(6390),
            driver.words(&format!("{head} 300")),
        ]
    });
}
