// An empty kernel with clusters of CTAS: the driver is asked how many of them run at one time.
//
// The CTAs of a cluster share a GPC. An H200's 132 SMs are in GPCs of different sizes. With one CTA
// an SM it runs 66 clusters of two, 30 of four and 15 of eight.

extern "C" __global__ void __cluster_dims__(CTAS) nothing() {}
