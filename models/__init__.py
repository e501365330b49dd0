"""Workloads, acceptance models, benchmark and demo of tf_stitch (not part of the installed package)."""
