// An empty kernel with clusters of CTAS, for the driver to say how many of them run at a time.
//
// The CTAs of a cluster share a GPC, and the 132 SMs of an H200 are in GPCs of different sizes. With
// one CTA per SM an H200 runs 66 clusters of two, 30 of four and 15 of eight.

extern "C" __global__ void __cluster_dims__(CTAS) nothing() {}
