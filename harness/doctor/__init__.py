"""Judge whether the machine is fit to measure."""
