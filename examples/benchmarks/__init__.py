"""The parts of `bench.py`: one file for each thing that is measured, and what they share."""
