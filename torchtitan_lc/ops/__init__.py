"""Element-wise and matrix work in tiles over tokens: torch only, no process groups."""
