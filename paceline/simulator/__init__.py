"""The simulator: the real scheduler on a virtual GPU and a virtual clock."""
