"""StagedAdapter -> the rows of a slot. The only place that writes into the model."""
