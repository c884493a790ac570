"""Plain functions on tensors; fast kernels live beside the plain twin they must agree with."""
