"""Generation in this process, from the training weights themselves."""
