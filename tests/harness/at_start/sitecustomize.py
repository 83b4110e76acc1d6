"""Plants faults in a process before its program begins: Python imports this file where its folder is in PYTHONPATH."""

from tests.harness.planted_faults import plant

plant()
