"""RawAdapter + Layout -> Adapter: names matched to the model's, ranks and scalings settled."""
