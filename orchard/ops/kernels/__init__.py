"""Fast kernels, each beside a plain twin that it must agree with."""
