"""Measurements behind ``orca-serve bench``. Nothing here is imported by what serves."""
