"""How a draft learns: what it learns from, the loss, and training it before and during a run."""
