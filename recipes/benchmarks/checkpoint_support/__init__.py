"""What the checkpoint benchmark is made of: the ways to save, the measurements, the tables."""
