//! Real MPI jobs on a lab: build a program with an MPI's own compiler, run it over the nodes, read
//! what it says.
