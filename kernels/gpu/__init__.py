"""GPU kernels in Triton."""
