"""Every process of the tests computes in one thread: several run at once, and more threads only wait for each other."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; server processes inherit it
