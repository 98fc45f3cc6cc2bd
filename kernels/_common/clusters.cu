// Nothing: a kernel of clusters, to ask the driver how many of them run at one time.
//
// A cluster is of one GPC. An H200's 132 SMs are in GPCs of unlike sizes: with an SM to a CTA it
// runs 66 clusters of two, 30 of four and 15 of eight.
//
// Compiled with -DCTAS, of a cluster.

extern "C" __global__ void __cluster_dims__(CTAS) nothing() {}
