"""What the real scheduler would do: experiments on the virtual clock."""
