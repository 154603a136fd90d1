"""The ``orca-serve`` command. Ray and torch are imported by ``up`` alone, once its arguments are known good."""
