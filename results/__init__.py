"""Records of measurements, runs on disk, and everything that is computed from them."""
