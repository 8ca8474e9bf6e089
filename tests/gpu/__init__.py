"""What needs a GPU: checks that ``scripts/gpu_check.sh`` runs as a program, so that no test run has them as skips.

None of it has run on a GPU. ``python -m tests.gpu --dry`` runs the same checks on a simulated device.
"""
