"""What kernels of more than one family share."""
