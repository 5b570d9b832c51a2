//! Frameworks that are no MPI: unmodified programs on two hosts, started by `slim run`. With connections being killed all the time they
//! give the result of an undisturbed run, bit by bit. Without SLIM they do not.

mod common;

use common::framework::{disturbed::rides_through, jobs};

#[test]
fn pytorch_trains_with_torchrun() {
    rides_through("pytorch_trains_with_torchrun", &jobs::PYTORCH);
}

#[test]
fn mpi4py_reduces() {
    rides_through("mpi4py_reduces", &jobs::MPI4PY);
}

#[test]
fn jax_trains() {
    rides_through("jax_trains", &jobs::JAX);
}

#[test]
fn xgboost_trains() {
    rides_through("xgboost_trains", &jobs::XGBOOST);
}

#[test]
fn lightgbm_trains() {
    rides_through("lightgbm_trains", &jobs::LIGHTGBM);
}

#[test]
fn dask_computes() {
    rides_through("dask_computes", &jobs::DASK);
}

#[test]
fn ray_computes() {
    rides_through("ray_computes", &jobs::RAY);
}
