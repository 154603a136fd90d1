"""``orca-serve bench peers``: this engine beside others on the same machine, weights and requests, in one run."""
