"""Release gates: what has to hold before a release, run from the installed wheel (``python -m scripts.gates -h``)."""
