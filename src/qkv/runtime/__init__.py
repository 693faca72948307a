"""What makes Python functions run on all cores: compiling and caching them, a team of threads, atomics, the machine."""
