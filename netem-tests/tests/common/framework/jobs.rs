//! The jobs: for each framework, the processes of a job on two nodes.

use std::path::Path;

use slim_lab::{Lab, artifacts, mpi};

use super::{Framework, Part, script, turns};

/// The extent of a job.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Processes on each node. Dask and Ray always have one worker there.
    pub per_node: usize,
    /// Steps of the program's loop, unless the job is run in turns.
    pub steps: u32,
    /// Whether the job is run in turns ([`turns`](super::turns)).
    pub in_turns: bool,
}

/// A framework and its job.
#[derive(Clone, Copy)]
pub struct Job {
    pub framework: Framework,
    /// Steps of a job that is disturbed in the test: some seconds.
    pub steps: u32,
    /// The processes on this lab, whose Python programs need this interpreter.
    pub parts: fn(&Lab, &Path, Extent) -> Vec<Part>,
    /// Whether each process has the loop. Otherwise the last part alone has it.
    pub loop_everywhere: bool,
}

pub const PYTORCH: Job = Job {
    framework: Framework::debian("PyTorch", "torch"),
    steps: 100,
    parts: pytorch,
    loop_everywhere: true,
};
pub const JAX: Job = Job {
    framework: Framework::wheel("JAX", "jax"),
    steps: 200,
    parts: jax,
    loop_everywhere: true,
};
pub const XGBOOST: Job = Job {
    framework: Framework::wheel("XGBoost", "xgboost"),
    steps: 300,
    parts: xgboost,
    loop_everywhere: true,
};
pub const LIGHTGBM: Job = Job {
    framework: Framework::wheel("LightGBM", "lightgbm"),
    steps: 300,
    parts: lightgbm,
    loop_everywhere: true,
};
pub const MPI4PY: Job = Job {
    framework: Framework::wheel("mpi4py", "mpi4py.MPI"),
    steps: 200,
    parts: mpi4py,
    loop_everywhere: true,
};
pub const DASK: Job = Job {
    framework: Framework::wheel("Dask", "distributed").repeats(),
    steps: 60,
    parts: dask,
    loop_everywhere: false,
};
pub const RAY: Job = Job {
    framework: Framework::wheel("Ray", "ray").repeats(),
    steps: 300,
    parts: ray,
    loop_everywhere: false,
};

/// All jobs.
pub const ALL: [Job; 7] = [PYTORCH, JAX, XGBOOST, LIGHTGBM, MPI4PY, DASK, RAY];

/// The address of a node.
fn address(lab: &Lab, node: usize) -> String {
    lab.node(node).address(0).to_string()
}

/// The processes of a program, the first ones on the first node. `arguments` gets the number of the process.
fn ranks(
    python: &Path,
    program: &str,
    per_node: usize,
    arguments: impl Fn(usize) -> String,
) -> Vec<Part> {
    let part = |n| {
        let part = Part::new(n / per_node, python).path(script(program));
        part.words(&arguments(n))
    };
    (0..2 * per_node).map(part).collect()
}

fn pytorch(lab: &Lab, python: &Path, extent: Extent) -> Vec<Part> {
    let Extent {
        per_node, steps, ..
    } = extent;
    let master = address(lab, 0);
    let node = |n: usize| {
        // With the redirection, this version of torchrun works with this version of Python.
        let run = format!(
            "-m torch.distributed.run --nnodes 2 --nproc_per_node {per_node} --node_rank {n} --master_addr {master} \
             --master_port 29500 -r 1 -t 1"
        );
        let part = Part::new(n, python).words(&run);
        part.path(script("torch_train.py"))
            .words(&steps.to_string())
    };
    vec![node(0), node(1)]
}

fn mpi4py(lab: &Lab, python: &Path, extent: Extent) -> Vec<Part> {
    let Extent {
        per_node, steps, ..
    } = extent;
    let [a, b] = [0, 1].map(|n| lab.node(n).name());
    let launcher = Part::new(0, Path::new("/usr/bin/mpirun.openmpi"))
        .words("--mca plm_rsh_agent")
        .path(artifacts::program("slim-lab-agent").expect("the lab's agent"))
        .words(&format!(
            "--allow-run-as-root --host {a}:{per_node},{b}:{per_node} -n {}",
            2 * per_node
        ))
        .words(&mpi::by_tcp(&lab.subnet(0)).join(" "));
    let launcher = match extent.in_turns {
        true => launcher.words("-x").path(turns::SOCKET),
        false => launcher,
    };
    let program = launcher.path(python).path(script("mpi4py_sum.py"));
    vec![program.words(&steps.to_string())]
}

fn jax(lab: &Lab, python: &Path, extent: Extent) -> Vec<Part> {
    let Extent {
        per_node, steps, ..
    } = extent;
    let coordinator = address(lab, 0);
    ranks(python, "jax_train.py", per_node, |n| {
        format!("{n} {} {coordinator}:29800 {steps}", 2 * per_node)
    })
}

fn xgboost(lab: &Lab, python: &Path, extent: Extent) -> Vec<Part> {
    let Extent {
        per_node, steps, ..
    } = extent;
    let tracker = address(lab, 0);
    ranks(python, "xgboost_train.py", per_node, |n| {
        format!("{n} {} {tracker} 29600 {steps}", 2 * per_node)
    })
}

fn lightgbm(lab: &Lab, python: &Path, extent: Extent) -> Vec<Part> {
    let Extent {
        per_node, steps, ..
    } = extent;
    let machine = |n: usize| format!("{}:{}", address(lab, n / per_node), 29700 + n % per_node);
    let machines: Vec<_> = (0..2 * per_node).map(machine).collect();
    ranks(python, "lightgbm_train.py", per_node, |n| {
        format!("{n} {} {steps}", machines.join(","))
    })
}

fn dask(lab: &Lab, python: &Path, extent: Extent) -> Vec<Part> {
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
        client.words(&format!("{a}:8786 2 {}", extent.steps)),
    ]
}

fn ray(lab: &Lab, python: &Path, extent: Extent) -> Vec<Part> {
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
        driver.words(&format!("{head} {}", extent.steps)),
    ]
}
