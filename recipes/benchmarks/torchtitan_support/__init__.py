"""What the torchtitan benchmark is made of: its cases, the text, the ranks, the tables."""
