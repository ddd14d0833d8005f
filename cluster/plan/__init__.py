"""Where each layer lives and why. Pure, over facts of machines and of a model."""
