"""Sets of sound trainings and planted faults that findings are judged by: `python -m benchmarks.trust`."""
