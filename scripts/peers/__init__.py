"""What ``bench_peers.py`` is made of: workloads, one adapter an engine, environments, rounds, targets, report.

The modules that a child process imports (``child``, ``workloads``, ``timeline``, ``adapters``) need the standard
library alone, besides the one engine that they drive.
"""
