//! Frameworks that are no MPI: unmodified programs on two hosts, started by `slim run`. With connections being killed all the time they
//! give the result of an undisturbed run, bit by bit. Without SLIM they do not.

mod common;

use std::path::Path;

use common::framework::{Framework, Part, address, four, rides_through, script, with_wheels};
use slim_lab::{Lab, artifacts, mpi};

#[test]
fn pytorch_trains_with_torchrun() {
    let parts = |lab: &Lab, python: &Path| {
        let node = |n: usize| {
            let (address, script) = (address(lab, 0), script("torch_train.py"));
            let number = n.to_string();
            // With the redirection, this version of torchrun works with this version of Python.
            Part::new(
                n,
                python,
                &[
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    "2",
                    "--nproc_per_node",
                    "2",
                    "--node_rank",
                    &number,
                    "--master_addr",
                    &address,
                    "--master_port",
                    "29500",
                    "-r",
                    "1",
                    "-t",
                    "1",
                    &script,
                    "100",
                ],
            )
        };
        vec![node(0), node(1)]
    };
    let framework = Framework {
        name: "PyTorch",
        python: "/usr/bin/python3".into(),
        module: "torch",
        parts,
        bare_fails: true,
    };
    rides_through("pytorch_trains_with_torchrun", &framework);
}

#[test]
fn mpi4py_reduces() {
    let parts = |lab: &Lab, python: &Path| {
        let agent = artifacts::program("slim-lab-agent").expect("the lab's agent");
        let agent = agent.display().to_string();
        let hosts = format!("{}:2,{}:2", lab.node(0).name(), lab.node(1).name());
        let start = [
            "--mca",
            "plm_rsh_agent",
            &agent,
            "--allow-run-as-root",
            "--host",
            &hosts,
            "-n",
            "4",
        ];
        let tcp = mpi::by_tcp(&lab.subnet(0));
        let program = [
            &python.display().to_string(),
            &script("mpi4py_sum.py"),
            "200",
        ];
        let words = start
            .into_iter()
            .chain(tcp.iter().map(String::as_str))
            .chain(program);
        let words: Vec<_> = words.collect();
        vec![Part::new(0, Path::new("/usr/bin/mpirun.openmpi"), &words)]
    };
    let framework = Framework {
        name: "mpi4py",
        python: with_wheels(),
        module: "mpi4py.MPI",
        parts,
        bare_fails: true,
    };
    rides_through("mpi4py_reduces", &framework);
}

#[test]
fn jax_trains() {
    let parts = |lab: &Lab, python: &Path| {
        let coordinator = format!("{}:29800", address(lab, 0));
        four(python, |n| {
            let script = script("jax_train.py");
            [&script, &n.to_string(), "4", &coordinator, "200"]
                .map(String::from)
                .into()
        })
    };
    let framework = Framework {
        name: "JAX",
        python: with_wheels(),
        module: "jax",
        parts,
        bare_fails: true,
    };
    rides_through("jax_trains", &framework);
}

#[test]
fn xgboost_trains() {
    let parts = |lab: &Lab, python: &Path| {
        let address = address(lab, 0);
        four(python, |n| {
            let script = script("xgboost_train.py");
            [&script, &n.to_string(), "4", &address, "29600", "300"]
                .map(String::from)
                .into()
        })
    };
    let framework = Framework {
        name: "XGBoost",
        python: with_wheels(),
        module: "xgboost",
        parts,
        bare_fails: true,
    };
    rides_through("xgboost_trains", &framework);
}

#[test]
fn lightgbm_trains() {
    let parts = |lab: &Lab, python: &Path| {
        let (a, b) = (address(lab, 0), address(lab, 1));
        let machines = format!("{a}:29700,{a}:29701,{b}:29700,{b}:29701");
        four(python, |n| {
            let script = script("lightgbm_train.py");
            [&script, &n.to_string(), &machines, "300"]
                .map(String::from)
                .into()
        })
    };
    let framework = Framework {
        name: "LightGBM",
        python: with_wheels(),
        module: "lightgbm",
        parts,
        bare_fails: true,
    };
    rides_through("lightgbm_trains", &framework);
}

#[test]
fn dask_computes() {
    let parts = |lab: &Lab, python: &Path| {
        let dask = python.with_file_name("dask");
        let first = address(lab, 0);
        let scheduler = format!("{first}:8786");
        let mut parts = vec![
            Part::new(
                0,
                &dask,
                &[
                    "scheduler",
                    "--host",
                    &first,
                    "--port",
                    "8786",
                    "--no-dashboard",
                ],
            )
            .server(8786),
        ];
        for node in [0, 1] {
            let port = 8790;
            let (own, listen) = (address(lab, node), port.to_string());
            parts.push(
                Part::new(
                    node,
                    &dask,
                    &[
                        "worker",
                        &scheduler,
                        "--host",
                        &own,
                        "--worker-port",
                        &listen,
                        "--nthreads",
                        "1",
                        "--no-dashboard",
                        "--no-nanny",
                    ],
                )
                .server(port),
            );
        }
        parts.push(Part::new(
            1,
            python,
            &[&script("dask_sum.py"), &scheduler, "2", "60"],
        ));
        parts
    };
    let framework = Framework {
        name: "Dask",
        python: with_wheels(),
        module: "distributed",
        parts,
        bare_fails: false,
    };
    rides_through("dask_computes", &framework);
}

#[test]
fn ray_computes() {
    let parts = |lab: &Lab, python: &Path| {
        let ray = python.with_file_name("ray");
        let head = format!("{}:6379", address(lab, 0));
        let common = ["--num-cpus", "1", "--block"];
        let (a, b) = (address(lab, 0), address(lab, 1));
        // Ray makes Unix sockets there, so the path must be short.
        let files = lab.dir().join("r").display().to_string();
        let first = [
            "start",
            "--head",
            "--port",
            "6379",
            "--node-ip-address",
            &a,
            "--temp-dir",
            &files,
            "--include-dashboard=false",
        ];
        let second = [
            "start",
            "--address",
            &head,
            "--node-ip-address",
            &b,
            "--node-manager-port",
            "6390",
        ];
        vec![
            Part::new(0, &ray, &[&first[..], &common].concat()).server(6379),
            Part::new(1, &ray, &[&second[..], &common].concat()).server(6390),
            Part::new(0, python, &[&script("ray_sum.py"), &head, "300"]),
        ]
    };
    let framework = Framework {
        name: "Ray",
        python: with_wheels(),
        module: "ray",
        parts,
        bare_fails: false,
    };
    rides_through("ray_computes", &framework);
}
