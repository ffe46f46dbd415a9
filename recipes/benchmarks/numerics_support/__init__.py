"""What the numerics benchmark is made of: gradient families, measurements, special cases and bounds."""
